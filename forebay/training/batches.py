"""A batch, whole or in chunks, as the Control Unit sends it -> sequences with advantages. Every rank decodes the same
bytes.

Invariants:
- Each response token has exactly one finite behaviour log-probability, or the batch is refused.
- A chunk holds whole groups, so a group's advantages do not depend on the chunks; where they are whitened over the
  batch, the chunk is the whole batch (the profile's checks see to it).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgpack
import numpy as np

from forebay.config import AlgorithmConfig
from forebay.errors import RunError
from forebay.training.algorithms.advantages import Moments, group_advantages
from forebay.training.algorithms.overlong import overlong_penalty
from forebay.training.packing import TrainSequence


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over responses, those without any token included; chunks of a batch add up."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    """Response tokens: what the loss is a mean over."""
    rewards: float = 0.0
    """As the reward function gave them."""
    shaped: float = 0.0
    """With the penalty for length."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        """reward_mean, shaped_reward_mean, response_length_mean (over responses) and tokens; only tokens if empty."""
        metrics = {"tokens": float(self.tokens)}
        if self.responses:
            metrics["reward_mean"] = self.rewards / self.responses
            metrics["shaped_reward_mean"] = self.shaped / self.responses
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
    rewards: tuple[tuple[float, ...], ...]
    """Of each group's responses, shaped, those without tokens included."""
    places: tuple[tuple[int, int], ...]
    """Of each sequence: which response of which group it is."""

    def taught(self, algorithm: AlgorithmConfig, penalties: Sequence[float] | None = None) -> tuple[TrainSequence, ...]:
        """The sequences with their advantages. `penalties`: for each sequence, to be added to its reward."""
        rewards = [np.array(group) for group in self.rewards]
        for (group, member), penalty in zip(self.places, penalties or (), strict=False):
            rewards[group][member] += penalty
        advantages = [group_advantages(group.tolist(), algorithm.advantage) for group in rewards]
        values = np.array([advantages[group][member] for group, member in self.places])
        if algorithm.advantage == "reinforce_baseline":
            values = Moments.of(values, [len(s.ids) for s in self.sequences]).whiten(values)
        return tuple(
            replace(sequence, advantage=float(value)) for sequence, value in zip(self.sequences, values, strict=True)
        )


def decode_chunk(body: bytes, algorithm: AlgorithmConfig, budget: int) -> Chunk:
    """Unpack and check; `budget` is the response budget in tokens. Raises `RunError` that says what is wrong."""
    try:
        message = msgpack.unpackb(body)
        step, version, groups = int(message["step"]), int(message["version"]), message["groups"]
        complete = bool(message.get("complete", True))
        samples = [_group(group, version) for group in groups]
        rewards = [[float(sample["reward"]) for sample in group["samples"]] for group in groups]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise RunError(f"the Control Unit sent a malformed batch ({type(error).__name__}: {error})") from None
    shaped = [
        (np.array(given) + overlong_penalty([len(s.ids) for s in group], budget, *_overlong(algorithm))).tolist()
        for given, group in zip(rewards, samples, strict=True)
    ]
    totals = Totals(
        groups=len(groups),
        responses=sum(map(len, samples)),
        tokens=sum(len(s.ids) for group in samples for s in group),
        rewards=float(sum(map(sum, rewards))),
        shaped=float(sum(map(sum, shaped))),
    )
    places = [(g, m) for g, group in enumerate(samples) for m, sequence in enumerate(group) if len(sequence.ids)]
    sequences = tuple(samples[g][m] for g, m in places)
    return Chunk(step, version, sequences, totals, complete, tuple(map(tuple, shaped)), tuple(places))


def _overlong(algorithm: AlgorithmConfig) -> tuple[int, float]:
    return algorithm.overlong_buffer, algorithm.overlong_penalty


def _group(group: Mapping[str, Any], version: int) -> list[TrainSequence]:
    """Its responses, without advantages yet."""
    samples, prompt = group["samples"], group["prompt_ids"]
    where = f"group {group['group_id']}"
    if not prompt:
        raise ValueError(f"{where} has an empty prompt")
    if not all(math.isfinite(float(sample["reward"])) for sample in samples):
        raise ValueError(f"{where} has a reward that is not finite")
    for sample in samples:
        if len(sample["ids"]) != len(sample["logprobs"]) or not all(map(math.isfinite, sample["logprobs"])):
            raise ValueError(f"{where} has a response without one finite log-probability for each token")
    return [
        TrainSequence(
            prompt_ids=prompt,
            ids=sample["ids"],
            behaviour=sample["logprobs"],
            advantage=0.0,
            current=sample["oldest_version"] == version,
        )
        for sample in samples
    ]
