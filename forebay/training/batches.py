"""A batch, whole or in chunks, as the Control Unit sends it -> sequences with advantages. Every rank decodes the same
bytes.

Invariants:
- Each response token has exactly one finite behaviour log-probability, or the batch is refused.
- A chunk holds whole groups, so a group's advantages do not depend on the chunks; where they are whitened over the
  batch, the chunk is the whole batch (the profile's checks see to it).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from forebay.config import AlgorithmConfig
from forebay.errors import RunError
from forebay.training.algorithms.advantages import Moments, group_advantages
from forebay.training.algorithms.gae import gae, token_rewards
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
class Before:
    """What the models say of a chunk's response tokens before the step: (N,) float32, in the order of the sequences,
    the same on all ranks; zeros where nothing was asked."""

    logprobs: NDArray[np.float32]
    """The policy's."""
    penalties: NDArray[np.float32]
    """What the distance from the reference adds to a token's reward."""
    values: NDArray[np.float32]
    """The critic's."""


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

    def taught(self, algorithm: AlgorithmConfig, before: Before | None = None) -> list[TrainSequence]:
        """The sequences with all that is learnt from them; `before` where the algorithm asks for more than rewards."""
        if not self.sequences:
            return []
        if before is None:
            return self._by_groups(algorithm, [0.0] * len(self.sequences))
        if algorithm.advantage == "gae":
            taught = self._by_critic(algorithm, before)
        else:
            penalties = self._split(before.penalties)
            taught = self._by_groups(algorithm, [float(tokens.sum(dtype=np.float64)) for tokens in penalties])
        return [replace(s, proximal=p) for s, p in zip(taught, self._split(before.logprobs), strict=True)]

    def _by_groups(self, algorithm: AlgorithmConfig, penalties: list[float]) -> list[TrainSequence]:
        """`penalties`: for each sequence, to be added to its reward."""
        assert algorithm.advantage != "gae", "a critic's values are in Before"
        rewards = [np.array(group) for group in self.rewards]
        for (group, member), penalty in zip(self.places, penalties, strict=True):
            rewards[group][member] += penalty
        advantages = [group_advantages(group.tolist(), algorithm.advantage) for group in rewards]
        values = np.array([advantages[group][member] for group, member in self.places])
        if algorithm.advantage == "reinforce_baseline":
            values = Moments.of(values, [len(s.ids) for s in self.sequences]).whiten(values)
        return [replace(s, advantage=float(value)) for s, value in zip(self.sequences, values, strict=True)]

    def _by_critic(self, algorithm: AlgorithmConfig, before: Before) -> list[TrainSequence]:
        """PPO: a response's reward comes with its last token, penalties with each; in float64."""
        lengths = torch.tensor([len(s.ids) for s in self.sequences])
        outcomes = torch.tensor([self.rewards[group][member] for group, member in self.places], dtype=torch.float64)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        mask = torch.ones_like(sequence, dtype=torch.bool)
        penalties, values = (torch.from_numpy(x).double() for x in (before.penalties, before.values))
        rewards = token_rewards(outcomes.repeat_interleave(lengths), sequence, mask, penalties)
        found, returns = (
            x.numpy() for x in gae(rewards, values, sequence, mask, algorithm.gamma, algorithm.gae_lambda)
        )
        parts = (self._split(x) for x in (Moments.of(found).whiten(found), before.values, returns))
        return [replace(s, advantage=a, values=v, returns=r) for s, a, v, r in zip(self.sequences, *parts, strict=True)]

    def _split(self, tokens: NDArray[Any]) -> list[NDArray[Any]]:
        """(N,) -> for each sequence its part."""
        return np.split(tokens, np.cumsum([len(s.ids) for s in self.sequences])[:-1])


def decode_chunk(body: bytes, algorithm: AlgorithmConfig, budget: int, sync_every: int = 1) -> Chunk:
    """Unpack and check; `budget` is the response budget in tokens, `sync_every` the steps of a version. Raises
    `RunError` that says what is wrong."""
    try:
        message = msgpack.unpackb(body)
        step, version, groups = int(message["step"]), int(message["version"]), message["groups"]
        complete = bool(message.get("complete", True))
        # After its first step a version is only the engines': the trainer's weights have moved on.
        own = version if (step - 1) % sync_every == 0 else None
        samples = [_group(group, own) for group in groups]
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


def _group(group: Mapping[str, Any], own: int | None) -> list[TrainSequence]:
    """Its responses, without advantages yet. `own`: the version that the trainer's weights are, if any."""
    samples, prompt, images = group["samples"], group["prompt_ids"], tuple(group.get("images", ()))
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
            current=sample["oldest_version"] == own,
            images=images,
        )
        for sample in samples
    ]
