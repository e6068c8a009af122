"""What a run was taught by, how far engine and trainer agreed and what the critic knew: from the records of its steps.

Invariants: imports no torch; a number that no step has is null, a part of which nothing is known is null.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from forebay.config import RunConfig

CORRECTED = ("weight_mean", "clipped", "masked", "rejected")
MISMATCH = {
    "mean_abs": "mean_abs",
    "kl_k1": "kl_k1",
    "kl_k3": "kl_mean",
    "perplexity_ratio": "perplexity_ratio",
    "effective_sample_size": "effective_sample_size",
}
"""Name in the summary -> name in the metrics, after `mismatch/` or `off_policy/`."""
CRITIC = ("value_loss", "clip_fraction", "explained_variance")

Step = Mapping[str, Any]


def learning_of(config: RunConfig, steps: Sequence[Step]) -> dict[str, Any]:
    """The summary's `learning`. Numbers are means over steps, but `max_abs` (the largest), `alarms` (steps that had
    one) and `explained_variance_last` (of the last step). `corrected`: mean weight of the active correction, shares of
    tokens whose weight it cut, masked, or rejected with their response. `mismatch` and `off_policy`: see
    `training.algorithms.mismatch`; the first over the steps that had tokens of the version in training, the second of
    all tokens."""
    algorithm, training = config.algorithm, config.training
    return {
        "advantage": algorithm.advantage,
        "policy_loss": algorithm.policy_loss,
        "aggregation": algorithm.aggregation,
        "correction": algorithm.active_correction,
        "kl": algorithm.kl,
        "updates_per_batch": training.updates_per_batch,
        "mini_batches": training.mini_batches,
        "clip_fraction": _mean(steps, "clip_fraction"),
        "corrected": {name: _mean(steps, f"correction/{name}") for name in CORRECTED},
        "mismatch": _differences(steps, "mismatch"),
        "off_policy": _differences(steps, "off_policy"),
        "critic": _critic(steps) if algorithm.advantage == "gae" else None,
    }


def _differences(steps: Sequence[Step], kind: str) -> dict[str, float | None] | None:
    largest, alarms = _values(steps, f"{kind}/max_abs"), _values(steps, f"{kind}/alarm")
    if not largest:
        return None
    means = {name: _mean(steps, f"{kind}/{metric}") for name, metric in MISMATCH.items()}
    return {**means, "max_abs": max(largest), **({"alarms": sum(alarms)} if alarms else {})}


def _critic(steps: Sequence[Step]) -> dict[str, float | None]:
    last = _values(steps, "critic/explained_variance")[-1:]
    means = {name: _mean(steps, f"critic/{name}") for name in CRITIC}
    return {**means, "explained_variance_last": last[0] if last else None}


def _values(steps: Sequence[Step], name: str) -> list[float]:
    """Of the steps that have it; a number that was not finite is recorded as null."""
    return [float(step[name]) for step in steps if step.get(name) is not None]


def _mean(steps: Sequence[Step], name: str) -> float | None:
    values = _values(steps, name)
    return fmean(values) if values else None
