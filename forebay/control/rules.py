"""What the decisions depend on: the numbers of a run (`Rules`) and the work-in-progress credits (`Credits`)."""

import math
from dataclasses import dataclass
from typing import Literal

from forebay.control.types import RefreshMode

STARVED_SHARE = 0.05
"""A trainer that waited for more than this share of a step starved."""
RAISE, LOWER = 0.15, 0.03
"""Batches by which automatic credits change in a step: up fast, since starving costs throughput now, down slowly,
since stock costs only age (measured in the scheduling study that the project builds on)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything the decisions depend on. The modes are settings of these numbers."""

    steps: int
    """Optimizer steps of the run."""
    batch_groups: int
    """Slots in one step."""
    group_size: int
    """Responses in a group."""
    sync_every: int
    """Steps between two publications."""
    max_staleness: float
    """In versions; fractions admit that share of the next version's slots."""
    work_in_progress: float | None
    """Most outstanding groups, in batches; None: automatic."""
    max_concurrent_samples: int
    """Per engine."""
    queue_high: float = math.inf
    """In batches; with more than this queued nothing new starts."""
    queue_low: float = 0.0
    """In batches; with less than this queued the quickest minibatch of the next few starts first."""
    max_predicted_tokens: float = math.inf
    """Per engine, response tokens in flight."""
    over_sampling: float = 1.0
    """Groups started for each slot of a batch; above 1 the surplus goes stale."""
    max_refills: float = math.inf
    """Most filtered groups for each slot of one batch under `dynamic_sampling`."""
    stale: Literal["drop", "retry"] = "drop"
    dynamic_sampling: bool = False
    require_batches: int = 1
    """Batches that must be queued before the first of them is trained."""
    refresh: RefreshMode = "retract"
    refresh_all: bool = False
    """All engines refresh at the same time, not one after another."""

    @property
    def slots_per_version(self) -> int:
        return self.batch_groups * self.sync_every

    @property
    def staleness_bound(self) -> int:
        """The bound that every trained group keeps: `max_staleness` rounded up to whole versions."""
        return math.ceil(self.max_staleness)

    @property
    def total_slots(self) -> int:
        return self.batch_groups * self.steps

    def slots_allowed(self, version: int) -> float:
        """Slots below this number are trained while `version` is still within the bound (AReaL's pacing formula);
        over-sampled groups have slots beyond their batch and rely on the check at dequeue."""
        surplus = (self.over_sampling - 1) * self.batch_groups
        return (version + 1 + self.max_staleness) * self.slots_per_version + surplus


class Credits:
    """How many groups may be outstanding. Fixed, or following the trainer: mean staleness is about outstanding groups
    over batch size, so credits go no higher than keeps the trainer fed."""

    def __init__(self, rules: Rules, streaming: bool = False) -> None:
        self._rules = rules
        self._automatic = rules.work_in_progress is None
        self._most = (rules.max_staleness + 1) * rules.sync_every
        # One batch in generation per batch of waiting, and one in training unless it is trained as it comes.
        start = 1.5 + (0.25 if streaming else 1.0)
        start = max(min(start, self._most), float(rules.require_batches))
        self.batches = start if rules.work_in_progress is None else rules.work_in_progress
        self._bound = False

    @property
    def groups(self) -> float:
        return self.batches * self._rules.batch_groups * self._rules.over_sampling

    def refused(self) -> None:
        """A group that every other rule allowed had no credit."""
        self._bound = True

    def step(self, waited_share: float, queued: int) -> None:
        """A step is over: the trainer waited for this share of it and leaves so many groups in the queue."""
        if self._automatic:
            if waited_share > STARVED_SHARE and self._bound:
                self.batches = min(self.batches + RAISE, max(self._most, 1.0))
            elif queued >= self._rules.batch_groups:
                self.batches = max(self.batches - LOWER, float(self._rules.require_batches))
        self._bound = False
