"""The words of the Control Unit as plain data. No torch, no HTTP, no clock.

Invariants:
- `Sample.ids`, `Sample.logprobs` and the spans in `Sample.versions` cover the same tokens, in order.
- A policy version is a count of publications; version 0 is the start model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

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
    verifier: str = ""
    """The row's own verifier; "" leaves it to the profile."""
    images: tuple[str, ...] = ()
    """Names of its images in the run's data, in order; each is some of the `ids`."""


class VersionSpan(NamedTuple):
    """Response tokens [start, end) were produced by this policy version."""

    version: int
    start: int
    end: int
    stale_cache: bool = False
    """They were computed over a KV cache that holds other versions' keys (refresh `in_place`): their log-probs are
    those of the distribution that was sampled, which is neither version's exactly."""


@dataclass(slots=True)  # frozen would take three times as long to make, and an engine makes thousands a second
class Sample:
    """One response, or the tokens of it so far."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token under the policy and temperature that produced it, from the engine."""
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"] | None
    """None: not finished; it can be continued on any engine from its tokens so far."""

    @property
    def oldest_version(self) -> int:
        """Of at least one token."""
        return min([span.version for span in self.versions])

    @property
    def mean_version(self) -> float:
        """Weighted by tokens."""
        return sum(span.version * (span.end - span.start) for span in self.versions) / len(self.ids)


NOTHING = Sample((), (), (), None)
"""A response of which nothing has been generated yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one policy version, complete on disk."""

    version: int
    path: str
    """Directory in Hugging Face format with a `manifest.json` (see `forebay.training.snapshots`)."""
    manifest_sha256: str
    """SHA-256 of `manifest.json`, hex: pins every file and tensor of the snapshot."""


RefreshMode = Literal["retract", "in_place", "abort", "drain"]
"""What becomes of the responses in flight when an engine takes new weights: `retract` recomputes their KV cache and
goes on, `in_place` keeps the cache and goes on, `abort` ends them unfinished, `drain` lets them finish first."""


@dataclass(frozen=True, slots=True)
class RefreshRecord:
    """One engine has loaded one snapshot and proved it."""

    version: int
    pause_s: float
    """Time during which the engine decoded nothing (`drain`: from the last response on)."""
    tokens_recomputed: int = 0
    """Prompt and response tokens whose KV cache was computed again (`retract`)."""
    tokens_discarded: int = 0
    """Response tokens thrown away (`abort`)."""


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
    """The engine or the way to it broke; the same request may succeed elsewhere. Never becomes a reward.

    `partials`: what is known for certain of each response that was asked for (tokens, log-probs and versions), in
    order; empty if nothing is.
    """

    def __init__(self, message: str, partials: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.partials = tuple(partials)


class GenerationAborted(Exception):
    """The engine was told to end its responses unfinished (refresh `abort`, or to move them). Not a failure.

    `partials`: the tokens so far of each response that was asked for, in order, finished ones included.
    """

    def __init__(self, partials: Sequence[Sample]) -> None:
        super().__init__(f"{len(partials)} responses were ended unfinished")
        self.partials = tuple(partials)


class RequestRefused(DataError):
    """The engine refuses this prompt (too long, bad token); no engine will take it."""


OnFinished = Callable[[int], None]


class EngineLoad(NamedTuple):
    """What one engine has to do now, as far as its client knows (it learns of tokens in chunks)."""

    active: int
    """Responses in flight, those that wait inside the engine included."""
    context: int
    """Prompt and response tokens of these."""
    tokens: int
    """Response tokens received since the client was made."""
    prompts: int
    """Prompt tokens sent since then, each prompt once for all of its responses."""


class GenerationEngine(Protocol):
    """What the Control Unit knows of a Generation Unit."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        prefixes: Sequence[Sample],
        seed: int,
        on_finished: OnFinished | None = None,
        images: Sequence[str] = (),
    ) -> list[Sample]:
        """One finished response for each prefix (`NOTHING` for a fresh one), with the run's sampling settings.

        A response continues from its prefix's tokens and keeps them, their log-probs and versions; prefix and
        continuation together stay within the response budget. A prefix that is finished comes back as it is.
        Different seeds (any natural number) give independent responses, however close they lie.
        `on_finished` is told of each response that ends before the last one does: its tokens, the prefix included.
        `images`: names of the prompt's images.
        Raises `EngineFailure`, `GenerationAborted`, `RequestRefused`.
        """

    async def refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        """Load a snapshot in place; on failure the old weights keep serving, or the engine takes no more work, and
        `EngineFailure` is raised."""

    def load(self) -> EngineLoad:
        """For the record; no decision depends on it."""


class Scorer(Protocol):
    """What the Control Unit knows of the reward workers."""

    async def score(
        self, responses: Sequence[tuple[Sequence[int], bool]], answer: str, prompt: str, verifier: str
    ) -> Sequence[float]:
        """A reward for each (token ids, finished); raises `DataError` for the group's own fault."""


class Examination(Protocol):
    """What the Control Unit knows of held-out prompts that some versions answer during training."""

    def is_due(self, version: int) -> bool:
        """Whether the next engine that serves this version is to be examined."""

    async def examine(self, index: int, version: int) -> None:
        """Engine `index` keeps this version until it returns; raises nothing."""


class Fleet(Protocol):
    """What the Control Unit knows of the rollout fleet."""

    @property
    def engines(self) -> Sequence[GenerationEngine]: ...

    async def in_order(self, index: int) -> bool:
        """Whether the engine runs and answers."""

    async def restart(self, index: int) -> None:
        """End what is left of the engine and start it anew, with the start model."""
