"""The Control Unit's rules: a pure state machine. Events in (methods with verbs in the past), decisions out (`next_*`).

No clock, no sockets, no tasks: the asyncio shell (`unit.py`), the simulator and the tests drive this very code.

Invariants:
- Staleness: a group trained at version v has no token older than v - ceil(max_staleness). Admission counts from the
  trained frontier so that groups trained in turn keep the bound (AReaL's pacing formula, per engine); `next_batch`
  checks each group again and drops or retries the ones that were overtaken.
- Account: every admitted group is waiting, generating, being scored, queued or in training, and leaves by one fate.
- Slots: a batch is `batch_groups` slots. Trained groups use slots; filtered ones do too unless `dynamic_sampling`;
  stale and failed ones give theirs back, so that another group is admitted.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from forebay.control.ledger import Entry, Ledger
from forebay.control.source import Minibatch
from forebay.control.types import Fate, Prompt, Sample
from forebay.errors import RunError

REWARD_SPREAD = 1e-6
"""Rewards of a group closer together than this carry no advantage."""

FRUITLESS = 64
"""Groups in a row that fail or are filtered by `dynamic_sampling`, after which a run ends; or four batches of them."""


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
    work_in_progress: float
    """Most outstanding groups, in batches."""
    max_concurrent_samples: int
    """Per engine."""
    stale: Literal["drop", "retry"] = "drop"
    dynamic_sampling: bool = False

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


class Stage(Enum):
    """Where an admitted group is."""

    WAITING = auto()
    """To be generated again, at the front."""
    GENERATING = auto()
    SCORING = auto()
    QUEUED = auto()
    TRAINING = auto()


@dataclass(slots=True)
class Group:
    """One prompt's responses on their way."""

    group_id: int
    prompt: Prompt
    stage: Stage
    engine: int | None = None
    attempts: int = 0
    samples: tuple[Sample, ...] = ()
    rewards: tuple[float, ...] = ()
    trained_version: int | None = None

    @property
    def oldest_version(self) -> int:
        return min(sample.oldest_version for sample in self.samples)

    @property
    def teaches(self) -> bool:
        """Whether its rewards differ, so that it has an advantage."""
        return max(self.rewards) - min(self.rewards) > REWARD_SPREAD


@dataclass(slots=True)
class Engine:
    """What the controller knows of one Generation Unit."""

    version: int
    refreshing: bool = False
    groups: dict[int, float] = field(default_factory=dict)
    """Groups in flight here -> predicted tokens."""


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


class Controller:
    """Admission, dispatch, Training Queue, staleness, refresh order, ledger."""

    def __init__(self, rules: Rules, source: Iterator[Minibatch]) -> None:
        self.rules = rules
        self.ledger = Ledger()
        self.engines: dict[int, Engine] = {}
        self.groups: dict[int, Group] = {}
        self.steps_trained = 0
        self.published = 0
        self._source = source
        self._minibatch: deque[Prompt] = deque()
        self._retries: deque[int] = deque()
        self._batch: Batch | None = None
        self._fruitless = 0

    # ---- what is known

    @property
    def trainer_version(self) -> int:
        """The version that trains the next batch."""
        return self.steps_trained // self.rules.sync_every

    @property
    def frontier(self) -> int:
        """Slots that have been trained."""
        return self.steps_trained * self.rules.batch_groups

    @property
    def outstanding(self) -> int:
        """Groups waiting, generating, being scored, queued or in training."""
        return len(self.groups)

    @property
    def finished(self) -> bool:
        return self.steps_trained >= self.rules.steps

    @property
    def training_step(self) -> int | None:
        """The step that the trainer holds now."""
        return self._batch.step if self._batch else None

    def count(self, stage: Stage) -> int:
        return sum(group.stage is stage for group in self.groups.values())

    # ---- decisions

    def next_dispatch(self) -> Dispatch | None:
        """Prompts for the engine with the least predicted load, or None if no rule lets one start."""
        free = [(sum(engine.groups.values()), key) for key, engine in self.engines.items() if not engine.refreshing]
        for _, key in sorted(free):
            chosen = self._redispatch(key) or self._admit(key)
            if chosen:
                return Dispatch(key, chosen)
        return None

    def next_batch(self, step: int) -> Batch | None:
        """The batch of `step`, or None while too few groups are ready. Asking again for the same step gives it again.

        Groups that are too old for the version that trains now leave here, or go to the front to be made afresh.
        """
        if self._batch is not None and self._batch.step == step:
            return self._batch
        if step != self.steps_trained + 1:
            raise RunError(f"control: the trainer asks for step {step}, but step {self.steps_trained + 1} is next")
        version = self.trainer_version
        ready = [group for group in self.groups.values() if group.stage is Stage.QUEUED]
        fresh = []
        for group in ready:
            if version - group.oldest_version > self.rules.staleness_bound:
                self._expire(group, version)
            else:
                fresh.append(group)
        if len(fresh) < self.rules.batch_groups:
            return None
        fresh.sort(key=lambda group: (group.oldest_version, group.group_id))
        taken = fresh[: self.rules.batch_groups]
        for group in taken:
            group.stage, group.trained_version = Stage.TRAINING, version
        teaching = tuple(group for group in taken if group.teaches)
        skipped = tuple(group for group in taken if not group.teaches)
        self._batch = Batch(step, version, teaching, skipped)
        return self._batch

    def next_refresh(self) -> int | None:
        """The engine to refresh next; one at a time, so that never all of them stop."""
        if any(engine.refreshing for engine in self.engines.values()):
            return None
        behind = [(engine.version, key) for key, engine in self.engines.items() if engine.version < self.published]
        return min(behind)[1] if behind else None

    # ---- events

    def engine_joined(self, engine: int, version: int) -> None:
        """An engine is up and serves `version`."""
        self.engines[engine] = Engine(version)

    def engine_lost(self, engine: int) -> None:
        """An engine is gone: what it was generating waits at the front for another one."""
        for group_id in list(self.engines.pop(engine).groups):
            self._requeue(self.groups[group_id])

    def refresh_started(self, engine: int) -> None:
        self.engines[engine].refreshing = True

    def refresh_done(self, engine: int, version: int) -> None:
        """The engine has proved that it serves `version`."""
        self.engines[engine].refreshing = False
        self.engines[engine].version = version

    def generated(self, group_id: int, attempt: int, samples: tuple[Sample, ...]) -> bool:
        """All responses of a group are there; they wait for their rewards. False for a late answer: the engine was
        given up meanwhile and the group is being made by another attempt, which is the one that counts."""
        group = self._generating(group_id, attempt)
        if group is None:
            return False
        self._release(group)
        group.samples, group.stage = samples, Stage.SCORING
        return True

    def scored(self, group_id: int, rewards: tuple[float, ...]) -> None:
        """The group enters the Training Queue, or is filtered."""
        group = self._at(group_id, Stage.SCORING)
        group.rewards, group.stage = rewards, Stage.QUEUED
        if self.rules.dynamic_sampling and not group.teaches:
            self._leave(group, Fate.FILTERED, "all rewards are equal")
            self._count_fruitless("all rewards are equal")
        else:
            self._fruitless = 0

    def refused(self, group_id: int, attempt: int, reason: str) -> None:
        """No engine takes this prompt: the group fails, for its data's sake."""
        group = self._generating(group_id, attempt)
        if group is not None:
            self._release(group)
            self._leave(group, Fate.FAILED, reason)
            self._count_fruitless(reason)

    def scoring_failed(self, group_id: int, reason: str) -> None:
        """The group's responses cannot be scored: it fails, for its data's sake."""
        self._leave(self._at(group_id, Stage.SCORING), Fate.FAILED, reason)
        self._count_fruitless(reason)

    def generation_failed(self, group_id: int, attempt: int) -> bool:
        """The engine or the way to it broke: the group is generated again, at the front. False for a late word of an
        attempt that no longer counts."""
        group = self._generating(group_id, attempt)
        if group is None:
            return False
        self._release(group)
        self._requeue(group)
        return True

    def step_trained(self, step: int) -> None:
        """The trainer has done `step`: its groups have their fate and the frontier moves."""
        batch = self._batch
        if batch is None or batch.step != step:
            raise RunError(f"control: the trainer reports step {step}, but holds {batch.step if batch else 'no batch'}")
        for group in batch.groups:
            self._leave(group, Fate.TRAINED, "")
        for group in batch.skipped:
            group.trained_version = None
            self._leave(group, Fate.FILTERED, "all rewards are equal")
        self._batch = None
        self.steps_trained = step
        self.ledger.check(len(self.groups))

    def snapshot_published(self, version: int) -> None:
        """The weights of `version` can be loaded."""
        if version != self.published + 1:
            raise RunError(f"control: version {version} was published after {self.published}")
        self.published = version

    # ---- the rules behind them

    def _admit(self, key: int) -> tuple[Group, ...]:
        """New groups from the next minibatch, as many as every rule allows; a minibatch may start in parts."""
        room = self._room(key)
        if room < 1:
            return ()
        if not self._minibatch:
            self._minibatch.extend(next(self._source))
        chosen = []
        for _ in range(min(room, len(self._minibatch))):
            prompt = self._minibatch.popleft()
            group = Group(self.ledger.admitted, prompt, Stage.WAITING)
            self.ledger.admit(group.group_id, prompt)
            self.groups[group.group_id] = group
            self._start(group, key)
            chosen.append(group)
        return tuple(chosen)

    def _room(self, key: int) -> int:
        """How many new groups may start on this engine now."""
        rules, slot = self.rules, self.frontier + self.outstanding
        return math.floor(
            min(
                rules.total_slots - slot,
                rules.work_in_progress * rules.batch_groups - self.outstanding,
                self._oldest_allowed(key) - slot,
                self._sample_room(key),
            )
        )

    def _oldest_allowed(self, key: int) -> float:
        """Slots below this number are trained while this engine's version is still within the bound."""
        return (self.engines[key].version + 1 + self.rules.max_staleness) * self.rules.slots_per_version

    def _sample_room(self, key: int) -> int:
        busy = len(self.engines[key].groups) * self.rules.group_size
        return (self.rules.max_concurrent_samples - busy) // self.rules.group_size

    def _redispatch(self, key: int) -> tuple[Group, ...]:
        """The first group that waits to be made again; its slot is counted already."""
        last_slot = self.frontier + self.outstanding - 1
        if not self._retries or self._sample_room(key) < 1 or last_slot >= self._oldest_allowed(key):
            return ()
        group = self.groups[self._retries.popleft()]
        self._start(group, key)
        return (group,)

    def _start(self, group: Group, key: int) -> None:
        group.stage, group.engine = Stage.GENERATING, key
        group.attempts += 1
        self.engines[key].groups[group.group_id] = group.prompt.predicted_length * self.rules.group_size

    def _release(self, group: Group) -> None:
        engine = self.engines.get(group.engine) if group.engine is not None else None
        if engine is not None:
            engine.groups.pop(group.group_id, None)
        group.engine = None

    def _requeue(self, group: Group) -> None:
        group.stage, group.engine, group.samples, group.rewards = Stage.WAITING, None, (), ()
        self._retries.append(group.group_id)

    def _expire(self, group: Group, version: int) -> None:
        if self.rules.stale == "retry":
            self._requeue(group)
        else:
            age = version - group.oldest_version
            self._leave(group, Fate.STALE, f"{age} versions old, the bound is {self.rules.staleness_bound}")

    def _count_fruitless(self, reason: str) -> None:
        """Raises `RunError` when so many groups in a row came to nothing that the next ones will too."""
        self._fruitless += 1
        if self._fruitless >= max(4 * self.rules.batch_groups, FRUITLESS):
            raise RunError(
                f"control: {self._fruitless} groups in a row could not be trained, the last because: {reason}; look at "
                "the data, the reward and the model"
            )

    def _leave(self, group: Group, fate: Fate, reason: str) -> None:
        del self.groups[group.group_id]
        self.ledger.settle(
            Entry(
                group_id=group.group_id,
                prompt=group.prompt,
                fate=fate,
                reason=reason,
                samples=group.samples,
                rewards=group.rewards,
                oldest_version=group.oldest_version if group.samples else None,
                trained_version=group.trained_version,
                attempts=group.attempts,
            )
        )

    def _generating(self, group_id: int, attempt: int) -> Group | None:
        """The group if this attempt at generating it still counts."""
        group = self.groups.get(group_id)
        if group is None or group.stage is not Stage.GENERATING or group.attempts != attempt:
            return None
        return group

    def _at(self, group_id: int, stage: Stage) -> Group:
        group = self.groups[group_id]
        if group.stage is not stage:
            raise RunError(f"control: group {group_id} is {group.stage.name.lower()}, expected {stage.name.lower()}")
        return group
