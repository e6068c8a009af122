"""A batch as the Control Unit sends it -> sequences with advantages. Every rank decodes the same bytes.

Invariants:
- Each response token has exactly one finite behaviour log-probability, or the batch is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import numpy as np

from forebay.errors import RunError
from forebay.training.advantages import group_advantages
from forebay.training.packing import TrainSequence


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The groups of one optimizer step, of all ranks together."""

    step: int
    version: int
    """The policy version that trains it."""
    sequences: tuple[TrainSequence, ...]
    """Responses without any token are left out."""
    metrics: dict[str, float]
    """reward_mean, advantage_abs_mean, response_length_mean (over responses) and tokens; only tokens if empty."""

    @property
    def tokens(self) -> int:
        """Response tokens: what the loss is a mean over."""
        return sum(len(s.ids) for s in self.sequences)


def decode_batch(body: bytes, advantage: Literal["std", "mean"]) -> TrainBatch:
    """Unpack and check; raises `RunError` that says what is wrong with the batch."""
    try:
        message = msgpack.unpackb(body)
        step, version = int(message["step"]), int(message["version"])
        samples = [item for group in message["groups"] for item in _group(group, version, advantage)]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise RunError(f"the Control Unit sent a malformed batch ({type(error).__name__}: {error})") from None
    metrics = {"tokens": float(sum(len(s.ids) for s, _ in samples))}
    if samples:
        metrics["reward_mean"] = float(np.mean([reward for _, reward in samples]))
        metrics["advantage_abs_mean"] = float(np.mean([abs(s.advantage) for s, _ in samples]))
        metrics["response_length_mean"] = metrics["tokens"] / len(samples)
    return TrainBatch(step, version, tuple(s for s, _ in samples if len(s.ids)), metrics)


def _group(
    group: Mapping[str, Any], version: int, advantage: Literal["std", "mean"]
) -> list[tuple[TrainSequence, float]]:
    samples, prompt = group["samples"], group["prompt_ids"]
    rewards = [float(sample["reward"]) for sample in samples]
    where = f"group {group['group_id']}"
    if not prompt:
        raise ValueError(f"{where} has an empty prompt")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"{where} has a reward that is not finite")
    for sample in samples:
        if len(sample["ids"]) != len(sample["logprobs"]) or not all(map(math.isfinite, sample["logprobs"])):
            raise ValueError(f"{where} has a response without one finite log-probability for each token")
    advantages = group_advantages(rewards, advantage)
    return [
        (
            TrainSequence(
                prompt_ids=prompt,
                ids=sample["ids"],
                behaviour=sample["logprobs"],
                advantage=float(value),
                current=sample["oldest_version"] == version,
            ),
            reward,
        )
        for sample, value, reward in zip(samples, advantages, rewards, strict=True)
    ]
