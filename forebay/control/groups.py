"""The controller's own records of groups and engines, and the decisions it hands out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

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

    __hash__ = object.__hash__  # Enum's own is Python code, and stages are counted all the time


@dataclass(slots=True)
class Group:
    """One prompt's responses on their way."""

    group_id: int
    prompt: Prompt
    size: int
    stage: Stage
    alike_teaches: bool = False
    """It is trained whether its rewards differ or not."""
    engine: int | None = None
    attempts: int = 0
    late: int = 0
    """Times that it took longer than its deadline."""
    engines: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    """Finished responses, or before that the tokens kept from an attempt that broke off; empty: nothing yet."""
    rewards: tuple[float, ...] = ()
    trained_version: int | None = None
    expected: float | None = None
    """Mean response length as corrected when it was first started, in tokens."""
    born: int = 0
    """No token of it is older than this version, while it is being made."""
    finished: list[int] = field(default_factory=list)
    """In flight: tokens of the responses that are done."""
    running: int = 0
    """In flight: responses that are not done."""
    reached: int = 0
    """In flight: tokens that each of those has at least (on average, where it goes on from prefixes)."""
    fresh: bool = True
    """In flight: all its responses began together, from nothing."""
    load: float = 0.0
    """In flight: response tokens that are still expected."""
    footprint: float = 0.0
    """In flight: response tokens that are expected in all."""

    @property
    def prefixes(self) -> tuple[Sample, ...]:
        """What to continue from, one for each response."""
        return self.samples or (NOTHING,) * self.size

    @property
    def oldest_version(self) -> int:
        """Of at least one token."""
        return min([span.version for sample in self.samples for span in sample.versions])

    @property
    def tokens(self) -> int:
        return sum([len(sample.ids) for sample in self.samples])

    @property
    def making(self) -> bool:
        """Whether it has tokens, or is getting some, and is not ready for the queue."""
        in_flight = self.stage in (Stage.GENERATING, Stage.SCORING)
        return in_flight or (self.stage is Stage.WAITING and bool(self.samples))

    @property
    def teaches(self) -> bool:
        """Whether it has advantages: its rewards differ, or need not."""
        return self.alike_teaches or max(self.rewards) - min(self.rewards) > REWARD_SPREAD


class Dispatch(NamedTuple):
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
