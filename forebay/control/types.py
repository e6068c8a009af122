"""The words of the Control Unit as plain data. No torch, no HTTP, no clock.

Invariants:
- `Sample.ids`, `Sample.logprobs` and the spans in `Sample.versions` cover the same tokens, in order.
- A policy version is a count of publications; version 0 is the start model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from forebay.errors import DataError, RunError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the training data, ready for an engine."""

    prompt_id: str
    ids: tuple[int, ...]
    text: str
    answer: str
    """JSON; what the reward checks against."""
    predicted_length: float
    """Mean response length in tokens, as predicted before the run."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were produced by this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the policy and temperature that produced it, from the engine."""
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one policy version, complete on disk."""

    version: int
    path: str
    """Directory in Hugging Face format with a `manifest.json` (see `forebay.training.snapshots`)."""
    manifest_sha256: str
    """SHA-256 of `manifest.json`, hex: pins every file and tensor of the snapshot."""


@dataclass(frozen=True, slots=True)
class RefreshRecord:
    """One engine has loaded one snapshot and proved it."""

    version: int
    pause_s: float
    """Time during which the engine decoded nothing."""


class Fate(StrEnum):
    """The one way a group leaves."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its rewards are all equal: no advantage, nothing to learn."""
    STALE = "stale"
    """Older than the bound when it was to be trained, and `stale: drop`."""
    FAILED = "failed"
    """For its data's sake, with a reason."""


class EngineFailure(RunError):
    """The engine or the way to it broke; the same request may succeed elsewhere. Never becomes a reward."""


class RequestRefused(DataError):
    """The engine refuses this prompt (too long, bad token); no engine will take it."""


class GenerationEngine(Protocol):
    """What the Control Unit knows of a Generation Unit."""

    async def generate(self, prompt_ids: Sequence[int], n: int, seed: int) -> list[Sample]:
        """`n` responses to one prompt with the run's sampling settings; raises `EngineFailure`, `RequestRefused`.

        Different seeds (any natural number) give independent responses, however close they lie."""

    async def refresh(self, snapshot: Snapshot) -> RefreshRecord:
        """Load a snapshot in place; on failure the old weights keep serving and `EngineFailure` is raised."""
