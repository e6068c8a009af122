"""What the decisions depend on: the numbers of a run (`Rules`) and the work-in-progress credits (`Credits`)."""

import math
from dataclasses import dataclass
from typing import Literal

from forebay.config import RunConfig
from forebay.control.types import RefreshMode

STARVED_SHARE = 0.0
"""A trainer that waited for more than this share of its time starves."""
FULL = 0.975
"""Engines with this share of their slots taken have nothing to gain from more groups."""
MOST_RAISED, RAISED_PER_SHARE, LOWERED = 0.15, 2.0, 0.02
"""Batches by which automatic credits change in a step: up by twice the share waited, since starving costs throughput
now, down slowly, since work in progress costs only age; but down by as many groups as went stale."""
NOTICEABLE = 0.01
"""With more than this share of the batches' groups gone stale of late, credits do not rise: what more groups win in
free slots they lose in work that is thrown away."""
MEMORY = 0.75
"""Weight of the past in the running means of waiting, of slots taken and of groups gone stale."""
SAFE = 0.5
"""Automatic credits begin with at most this share of the groups that the staleness bound admits."""
LONGEST_OVER_MEAN = 1.5
"""Expected longest length of a group over the mean length, for groups of about eight."""


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
    """Per engine: a group starts while fewer responses than this are in flight there."""
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
    alike_teaches: bool = False
    """A group whose rewards are all equal is trained like any other."""
    require_batches: int = 1
    """Batches that must be queued before the first of them is trained."""
    refresh: RefreshMode = "retract"
    refresh_all: bool = False
    """All engines refresh at the same time, not one after another."""
    wait_for_oldest: bool = False
    """Keep places in a whole batch for groups that are not ready and would be too old for the next version, rather
    than let others overtake them and drop them."""
    minibatch_barrier: bool = False
    """An engine gets a minibatch when it has no other group."""
    max_new_tokens: float = math.inf
    """Response budget in tokens: no prediction is above it."""
    correct_lengths: bool = True
    """Predicted lengths follow what the run shows (`forebay.lengths.online`)."""

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


def rules_of(config: RunConfig) -> Rules:
    """The admission rule that a profile asks for."""
    return Rules(
        steps=config.training.steps,
        batch_groups=config.control.batch_groups,
        require_batches=config.control.require_batches,
        group_size=config.generation.group_size,
        sync_every=config.control.sync_every,
        max_staleness=config.staleness_bound,
        work_in_progress=None if config.work_in_progress == "auto" else config.work_in_progress,
        max_concurrent_samples=config.concurrent_samples,
        queue_high=config.control.queue.high,
        # Without staleness the whole batch has to come before anything goes on: haste would only change the order.
        queue_low=0.0 if config.has_barrier else config.control.queue.low,
        max_predicted_tokens=config.control.max_predicted_tokens or math.inf,
        over_sampling=config.control.over_sampling,
        max_refills=config.control.max_refills,
        stale=config.control.stale,
        dynamic_sampling=config.control.dynamic_sampling,
        alike_teaches=config.algorithm.advantage == "gae" and not config.control.dynamic_sampling,
        refresh=config.control.refresh,
        refresh_all=config.refresh_all,
        wait_for_oldest=config.mode == "one_step_off",
        minibatch_barrier=config.schedule.minibatch_barrier,
        max_new_tokens=config.generation.max_new_tokens,
        correct_lengths=config.lengths.online,
    )


class Credits:
    """How many groups may be outstanding. Fixed, or following the trainer: mean staleness is about outstanding groups
    over batch size, so credits go no higher than keeps the trainer fed.

    Automatic credits start near the analytic value (the scheduling study): with all slots of the engines at work there
    are slots / group_size groups begun, about `LONGEST_OVER_MEAN` times as many open (a group is open until its longest
    response ends), and with them a quarter of a batch in a trainer that takes groups as they come, or a whole one. But
    no more than `SAFE` of what the staleness bound admits: the last groups of a batch are about twice as old as the
    mean, and with more of them the last ones go stale.
    """

    def __init__(self, rules: Rules, streaming: bool = False) -> None:
        self._rules = rules
        self._automatic = rules.work_in_progress is None
        self._most = max((rules.max_staleness + 1) * rules.sync_every, 1.0)
        self._least = float(rules.require_batches)
        self._trainer = 0.25 if streaming else 1.0
        self._share = 1.0
        self._begun = False
        self._waited: float | None = None
        self._filled = 1.0
        self._stale, self._stale_now = 0.0, 0.0  # groups over those of a batch: running mean, in this step
        self.batches = self._least if rules.work_in_progress is None else rules.work_in_progress

    @property
    def groups(self) -> float:
        """Most outstanding groups now; at least one, whatever share is let out."""
        rules = self._rules
        whole = self.batches * rules.batch_groups * rules.over_sampling
        return max(self._share * whole, min(whole, 1.0))

    def launched(self, share: float) -> None:
        """The first wave is let out up to this share (0..1) of the credits."""
        self._share = min(max(share, 0.0), 1.0)

    def engines(self, count: int) -> None:
        """So many engines work; automatic credits start with what they can hold."""
        if self._automatic and not self._begun:
            rules = self._rules
            capacity = count * rules.max_concurrent_samples / (rules.batch_groups * rules.group_size)
            self.batches = self._within(min(LONGEST_OVER_MEAN * capacity + self._trainer, SAFE * self._most))

    def filled(self, share: float) -> None:
        """A group is finished; until now this share (0..1) of all slots was taken."""
        self._filled += (1 - MEMORY) / self._rules.batch_groups * (share - self._filled)

    def went_stale(self, groups: int) -> None:
        """So many groups were too old when their turn came."""
        self._stale_now += groups / self._rules.batch_groups

    def step(self, waited_share: float) -> None:
        """A step is over: the trainer waited for this share of it. Of the first one it waited for a cold start."""
        if not self._begun or not self._automatic:
            self._begun = True
            return
        self._waited = waited_share if self._waited is None else MEMORY * self._waited + (1 - MEMORY) * waited_share
        starved = self._waited - STARVED_SHARE
        stale, self._stale_now = self._stale_now, 0.0
        self._stale = MEMORY * self._stale + (1 - MEMORY) * stale
        if stale:
            self.batches = self._within(self.batches - stale)
        elif starved > 0 and self._filled < FULL and self._stale < NOTICEABLE:
            self.batches = self._within(self.batches + min(MOST_RAISED, RAISED_PER_SHARE * starved))
        else:
            self.batches = self._within(self.batches - LOWERED)

    def _within(self, batches: float) -> float:
        return max(min(batches, self._most), self._least)
