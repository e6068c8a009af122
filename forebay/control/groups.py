"""The controller's own records of groups and engines, and the decisions it hands out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from forebay.control.types import NOTHING, Prompt, Sample

REWARD_SPREAD = 1e-6
"""Rewards of a group closer together than this carry no advantage."""


class Stage(Enum):
    """Where an admitted group is."""

    WAITING = auto()
    """To be generated again or further, at the front."""
    GENERATING = auto()
    SCORING = auto()
    QUEUED = auto()
    TRAINING = auto()


@dataclass(slots=True)
class Group:
    """One prompt's responses on their way."""

    group_id: int
    prompt: Prompt
    size: int
    stage: Stage
    engine: int | None = None
    attempts: int = 0
    engines: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    """Finished responses, or before that the tokens kept from an attempt that broke off; empty: nothing yet."""
    rewards: tuple[float, ...] = ()
    trained_version: int | None = None

    @property
    def prefixes(self) -> tuple[Sample, ...]:
        """What to continue from, one for each response."""
        return self.samples or (NOTHING,) * self.size

    @property
    def oldest_version(self) -> int:
        """Of at least one token."""
        return min(sample.oldest_version for sample in self.samples if sample.ids)

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def teaches(self) -> bool:
        """Whether its rewards differ, so that it has an advantage."""
        return max(self.rewards) - min(self.rewards) > REWARD_SPREAD


@dataclass(slots=True)
class Engine:
    """What the controller knows of one Generation Unit."""

    version: int
    refreshing: bool = False
    groups: set[int] = field(default_factory=set)
    load: float = 0.0
    """Predicted tokens of the groups in flight here."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Decision: generate these groups on this engine."""

    engine: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Decision: train these groups. `skipped` were in the batch but teach nothing."""

    step: int
    version: int
    groups: tuple[Group, ...]
    skipped: tuple[Group, ...]


def worth_keeping(partials: Sequence[Sample]) -> bool:
    """Whether any token would be saved by going on from these."""
    return any(sample.ids for sample in partials)
