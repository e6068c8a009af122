"""A batch, whole or in chunks, as the Control Unit sends it -> sequences with advantages. Every rank decodes the same
bytes.

Invariants:
- Each response token has exactly one finite behaviour log-probability, or the batch is refused.
- A chunk holds whole groups, so a group's advantages do not depend on the chunks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgpack

from forebay.errors import RunError
from forebay.training.advantages import group_advantages
from forebay.training.packing import TrainSequence


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over responses, those without any token included; chunks of a batch add up."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    """Response tokens: what the loss is a mean over."""
    rewards: float = 0.0
    advantages: float = 0.0
    """Absolute values."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        """reward_mean, advantage_abs_mean, response_length_mean (over responses) and tokens; only tokens if empty."""
        metrics = {"tokens": float(self.tokens)}
        if self.responses:
            metrics["reward_mean"] = self.rewards / self.responses
            metrics["advantage_abs_mean"] = self.advantages / self.responses
            metrics["response_length_mean"] = self.tokens / self.responses
        return metrics


@dataclass(frozen=True, slots=True)
class Chunk:
    """Groups of one optimizer step, of all ranks together: the whole batch, or what there is of it yet."""

    step: int
    version: int
    """The policy version that trains it."""
    sequences: tuple[TrainSequence, ...]
    """Responses without any token are left out."""
    totals: Totals
    complete: bool
    """The last one of its step."""


def decode_chunk(body: bytes, advantage: Literal["std", "mean"]) -> Chunk:
    """Unpack and check; raises `RunError` that says what is wrong with it."""
    try:
        message = msgpack.unpackb(body)
        step, version, groups = int(message["step"]), int(message["version"]), message["groups"]
        complete = bool(message.get("complete", True))
        samples = [item for group in groups for item in _group(group, version, advantage)]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise RunError(f"the Control Unit sent a malformed batch ({type(error).__name__}: {error})") from None
    totals = Totals(
        groups=len(groups),
        responses=len(samples),
        tokens=sum(len(s.ids) for s, _ in samples),
        rewards=float(sum(reward for _, reward in samples)),
        advantages=float(sum(abs(s.advantage) for s, _ in samples)),
    )
    return Chunk(step, version, tuple(s for s, _ in samples if len(s.ids)), totals, complete)


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
