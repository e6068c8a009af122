"""The Control Unit's rules: a pure state machine. Events in (methods with verbs in the past), decisions out (`next_*`).

No clock, no sockets, no tasks: the asyncio shell (`unit.py`), the simulator and the tests drive this very code.

Invariants:
- Staleness: a group trained at version v has no token older than v - ceil(max_staleness). Admission counts from the
  trained frontier so that groups trained in turn keep the bound; at dequeue each group is checked again, and the ones
  that were overtaken are dropped or retried.
- Account: every admitted group is waiting, generating, being scored, queued or in training, and leaves by one fate.
- Slots: a batch is `batch_groups` slots. Trained groups use slots; filtered ones do too unless `dynamic_sampling`;
  stale and failed ones give theirs back, so that another group is admitted.
- Cost: an event costs O(log queue), a dispatch O(engines).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from forebay.control.engines import Engine, EnginePool
from forebay.control.groups import Batch, Dispatch, Group, Stage, worth_keeping
from forebay.control.ledger import Entry, Ledger
from forebay.control.open_groups import OpenGroups
from forebay.control.queue import Forming, TrainingQueue
from forebay.control.rules import Credits, Rules
from forebay.control.source import Intake, Minibatch
from forebay.control.types import Fate, Sample
from forebay.errors import RunError
from forebay.lengths.online import LengthCorrection

__all__ = ["Batch", "Controller", "Dispatch", "Engine", "Group", "Rules", "Stage"]

DEADLINES_ALLOWED = 3
"""Times that one group may take longer than its deadline before it fails."""


class Controller:
    """Admission, dispatch, Training Queue, staleness, refresh order, ledger."""

    def __init__(
        self, rules: Rules, source: Iterator[Minibatch], sink: Callable[[Entry], None], streaming: bool = False
    ) -> None:
        self.rules = rules
        self.open = OpenGroups(rules, sink)
        self.credits = Credits(rules, streaming)
        self.steps_trained = 0
        self.published = 0
        self._absorbed = 0  # groups of this step that a streaming trainer has accumulated: their work is done
        self.tokens_discarded = 0
        """Response tokens generated for groups that were then made afresh or dropped."""
        self._intake = Intake(source)
        self._pool = EnginePool(rules, LengthCorrection(rules.max_new_tokens) if rules.correct_lengths else None)
        self._retries: deque[int] = deque()
        self._queue = TrainingQueue(rules.batch_groups)

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
    def ledger(self) -> Ledger:
        return self.open.ledger

    @property
    def groups(self) -> dict[int, Group]:
        """Admitted and without a fate, by id."""
        return self.open.by_id

    @property
    def engines(self) -> dict[int, Engine]:
        return self._pool.engines

    @property
    def outstanding(self) -> int:
        """Groups waiting, generating, being scored, queued or in training."""
        return len(self.open.by_id)

    @property
    def finished(self) -> bool:
        return self.steps_trained >= self.rules.steps

    @property
    def training_step(self) -> int | None:
        """The step whose whole batch the trainer holds now."""
        forming = self._queue.forming
        return forming.step if forming and forming.complete else None

    def count(self, stage: Stage) -> int:
        return self.open.count(stage)

    # ---- decisions

    def next_dispatch(self) -> Dispatch | None:
        """Prompts for the engine with the least left to do, or None if no rule lets one start."""
        if not self._pool.any_free():
            return None
        room = self._room()
        if room < 1 and not self._retries:
            return None
        for key in self._pool.free():
            groups = self._redispatch(key) or (self._admit(key, room) if room >= 1 else ())
            if groups:
                return Dispatch(key, groups)
        return None

    def next_batch(self, step: int) -> Batch | None:
        """The whole batch of `step`, or None while too few groups are ready. Asked again, it gives the same."""
        done = self._queue.again(step)
        if done is not None:
            return done
        forming = self._form(step)
        if not forming.complete and len(self._queue) + forming.taken >= self._required(step):
            self._fill(forming, self._late_ones(forming))
        return forming.batch() if forming.complete else None

    def next_groups(self, step: int, received: int) -> tuple[Batch, bool] | None:
        """Streaming: the groups of `step` after the first `received`, as many as are ready, and whether the batch is
        complete with them; None while there is nothing new. What was handed out is committed to this step."""
        done = self._queue.again(step)
        if done is not None:
            return Batch(step, done.version, done.groups[received:], ()), True
        forming = self._form(step)
        self._absorbed = forming.taken
        if forming.taken or len(self._queue) >= self._required(step) - self.rules.batch_groups:
            self._fill(forming)
        fresh = tuple(forming.teaching[received:])
        if not fresh and not forming.complete:
            return None
        return Batch(step, forming.version, fresh, ()), forming.complete

    def next_refresh(self) -> int | None:
        """The engine to refresh next, if any."""
        return self._pool.next_refresh()

    # ---- events: engines

    def launched(self, share: float) -> None:
        """The first wave of groups is let out up to this share (0..1) of the credits."""
        self.credits.launched(share)

    def engine_joined(self, engine: int, version: int) -> None:
        """An engine is up and serves `version`."""
        self._pool.joined(engine, version)
        self.credits.engines(len(self.engines))

    def engine_lost(self, engine: int) -> None:
        """An engine is gone and gets no more work. What it was generating is requeued call by call, by
        `generation_failed` with what is known of each one's tokens."""
        self._pool.lost(engine)

    def hold(self, engine: int, held: bool) -> None:
        """The engine keeps the weights that it has, or may take newer ones again; it works on all the same."""
        self._pool.hold(engine, held)

    def refresh_started(self, engine: int) -> None:
        self._pool.refresh_started(engine)

    def refresh_done(self, engine: int, version: int) -> None:
        """The engine has proved that it serves `version`."""
        self._pool.refresh_done(engine, version)

    def refresh_failed(self, engine: int) -> None:
        """It serves its old version still, and may try again, perhaps with a newer one."""
        self._pool.refresh_failed(engine)

    # ---- events: groups

    def sample_finished(self, group_id: int, attempt: int, tokens: int) -> bool:
        """A response of a group has ended before the last one; ignored for an attempt that no longer counts. False
        if nothing can start for it: it needs no `next_dispatch` then."""
        group = self.open.generating(group_id, attempt)
        return group is not None and self._pool.sample_finished(group, tokens)

    def generated(self, group_id: int, attempt: int, samples: tuple[Sample, ...]) -> bool:
        """All responses of a group are there; they wait for their rewards. False for a late answer: the group is being
        made by another attempt, which is the one that counts."""
        group = self.open.generating(group_id, attempt)
        if group is None:
            return False
        self.credits.filled(self._pool.filled)
        self._pool.release(group)
        group.samples = samples
        self._pool.observed(group)
        self.open.move(group, Stage.SCORING)
        return True

    def generation_failed(self, group_id: int, attempt: int, partials: Sequence[Sample] = ()) -> bool:
        """The engine or the way to it broke, or it was told to stop: the group is generated further from its partial
        responses if their versions still allow, else afresh; at the front. False for an attempt that no longer
        counts."""
        group = self.open.generating(group_id, attempt)
        if group is None:
            return False
        self._pool.release(group)
        self._requeue(group, tuple(partials) if worth_keeping(partials) else group.samples)
        return True

    def aborted(self, group_id: int, attempt: int, partials: Sequence[Sample]) -> None:
        """A refresh (`abort`) ended its responses: they are thrown away, the group is made afresh, at the front."""
        group = self.open.generating(group_id, attempt)
        if group is not None:
            self._pool.release(group)
            group.samples = tuple(partials)
            self._requeue(group, ())

    def deadline_passed(self, group_id: int, attempt: int, limit_s: float) -> None:
        """The group took too long: it is made afresh, and fails after `DEADLINES_ALLOWED` times."""
        group = self.open.generating(group_id, attempt)
        if group is None:
            return
        group.late += 1
        self._pool.release(group)
        if group.late < DEADLINES_ALLOWED:
            self._requeue(group, ())
        else:
            self.open.leave(
                group, Fate.FAILED, f"{DEADLINES_ALLOWED} times longer than control.group_deadline_s {limit_s:g}"
            )

    def refused(self, group_id: int, attempt: int, reason: str) -> None:
        """No engine takes this prompt: the group fails, for its data's sake."""
        group = self.open.generating(group_id, attempt)
        if group is not None:
            self._pool.release(group)
            self.open.leave(group, Fate.FAILED, reason)
            self.open.count_fruitless(reason)

    def scored(self, group_id: int, rewards: tuple[float, ...]) -> None:
        """The group enters the Training Queue, or is filtered. Raises `RunError` if too many are filtered."""
        group = self.open.at(group_id, Stage.SCORING)
        group.rewards = rewards
        if self.rules.dynamic_sampling and not group.teaches:
            self.open.leave(group, Fate.FILTERED, "all rewards are equal")
            self.open.count_refill()
            return
        self.open.count_fruit()
        self.open.move(group, Stage.QUEUED)
        self._queue.push(group)

    def scoring_failed(self, group_id: int, reason: str) -> None:
        """The group's responses cannot be scored: it fails, for its data's sake."""
        self.open.leave(self.open.at(group_id, Stage.SCORING), Fate.FAILED, reason)
        self.open.count_fruitless(reason)

    # ---- events: trainer

    def step_trained(self, step: int, waited_share: float = 0.0) -> Batch | None:
        """The trainer has done `step`: its groups have their fate and the frontier moves. None for a step that was
        done before a restart. `waited_share`: of the step's time, spent waiting for data."""
        if step <= self.steps_trained:
            return None
        forming = self._queue.forming
        if forming is None or forming.step != step or not forming.complete:
            raise RunError(f"control: the trainer reports step {step}, but does not hold its whole batch")
        batch = forming.batch()
        for group in batch.groups:
            self.open.leave(group, Fate.TRAINED, "")
        for group in batch.skipped:
            group.trained_version = None
            self.open.leave(group, Fate.FILTERED, "all rewards are equal")
        self._queue.trained(batch)
        self.steps_trained = step
        self.open.count_step()
        self._absorbed = 0
        self.credits.step(waited_share)
        self.ledger.check(len(self.groups))
        return batch

    def checkpointed(self, step: int) -> None:
        """The trainer can go on from after `step`: batches up to it need not be served again."""
        self._queue.checkpointed(step)

    def snapshot_published(self, version: int) -> bool:
        """The weights of `version` can be loaded. False for one that was published before a restart."""
        if version <= self.published:
            return False
        if version != self.published + 1:
            raise RunError(f"control: version {version} was published after {self.published}")
        self.published = version
        self._pool.published(version)
        return True

    # ---- admission

    def _room(self) -> int:
        """New groups that may start now, as far as no engine is asked."""
        rules, slot = self.rules, self.frontier + self.outstanding
        if self.count(Stage.QUEUED) >= rules.queue_high * rules.batch_groups:
            return 0
        surplus = (rules.over_sampling - 1) * rules.batch_groups
        total, credits = rules.total_slots + surplus - slot, self.credits.groups - (self.outstanding - self._absorbed)
        return math.floor(min(total, credits))

    def _admit(self, key: int, room: int) -> tuple[Group, ...]:
        """New groups from the next minibatch, as many as every rule allows; a minibatch may start in parts."""
        slot, version = self.frontier + self.outstanding, self.engines[key].version
        room = math.floor(min(room, self.rules.slots_allowed(version) - slot, self._pool.room(key)))
        hurry = self.count(Stage.QUEUED) < self.rules.queue_low * self.rules.batch_groups
        if room < 1 or self._waits_for_whole(room, hurry):
            return ()
        chosen: list[Group] = []
        while len(chosen) < room and self._pool.fits(key, self._intake.peek(hurry).predicted_length):
            group = self.open.admit(self._intake.take())
            self._start(group, key)
            chosen.append(group)
            if not self._intake.left_in_minibatch:
                break
        return tuple(chosen)

    def _waits_for_whole(self, room: int, hurry: bool) -> bool:
        """Behind a minibatch barrier a part of a minibatch would keep an engine from the whole of it; so it waits
        for room as long as anything is generated, whose end brings some."""
        if not self.rules.minibatch_barrier or not self.count(Stage.GENERATING):
            return False
        self._intake.peek(hurry)
        return room < self._intake.left_in_minibatch

    def _redispatch(self, key: int) -> tuple[Group, ...]:
        """The first group that waits to be made again or further; its slot is counted already."""
        last_slot = self.frontier + self.outstanding - 1
        if not self._retries or last_slot >= self.rules.slots_allowed(self.engines[key].version):
            return ()
        group = self.groups[self._retries.popleft()]
        self._keep(group, group.samples)
        self._start(group, key)
        return (group,)

    # ---- the batch

    def _form(self, step: int) -> Forming:
        """The batch of the next step; what is too old for it leaves the queue."""
        if step != self.steps_trained + 1:
            raise RunError(f"control: the trainer asks for step {step}, but step {self.steps_trained + 1} is next")
        forming = self._queue.form(step, self.trainer_version)
        stale = tuple(self._queue.pop_stale(forming.version, self.rules.staleness_bound))
        self.credits.went_stale(len(stale))
        for group in stale:
            if self.rules.stale == "retry":
                self._requeue(group, ())
                continue
            age = forming.version - group.oldest_version
            self.tokens_discarded += group.tokens
            self.open.leave(group, Fate.STALE, f"{age} versions old, the bound is {self.rules.staleness_bound}")
        return forming

    def _required(self, step: int) -> int:
        """Groups that must be ready before `step` begins: several batches, where it is the first of several; no more
        than the steps that are left, and than the newest weights may still generate."""
        rules = self.rules
        if (step - 1) % rules.require_batches:
            return rules.batch_groups
        allowed = int(rules.slots_allowed(self.published)) // rules.batch_groups - (step - 1)
        return max(1, min(rules.require_batches, rules.steps - step + 1, allowed)) * rules.batch_groups

    def _fill(self, forming: Forming, keep: int = 0) -> None:
        for group in self._queue.fill(forming, keep):
            self.open.move(group, Stage.TRAINING)

    def _late_ones(self, forming: Forming) -> int:
        """Places to keep for groups that are not ready and that no later step of this version can take."""
        rules = self.rules
        if not rules.wait_for_oldest:
            return 0
        last = forming.version - rules.staleness_bound
        late = sum(group.making and group.born <= last for group in self.groups.values())
        later = (rules.sync_every - 1 - (forming.step - 1) % rules.sync_every) * rules.batch_groups
        return max(0, late - later)

    # ---- moving groups

    def _start(self, group: Group, key: int) -> None:
        group.attempts += 1
        self._pool.start(group, key)
        self.open.move(group, Stage.GENERATING)

    def _requeue(self, group: Group, kept: tuple[Sample, ...]) -> None:
        """To the front, to be made further from the tokens that are kept, or afresh."""
        self._keep(group, kept)
        group.rewards = ()
        self.open.move(group, Stage.WAITING)
        self._retries.append(group.group_id)

    def _keep(self, group: Group, kept: tuple[Sample, ...]) -> None:
        if worth_keeping(kept) and self._young_enough(kept):
            group.samples = kept
        else:
            self.tokens_discarded += max(group.tokens, sum(len(sample.ids) for sample in kept))
            group.samples = ()

    def _young_enough(self, partials: Sequence[Sample]) -> bool:
        """Going on is worth it if the batch after the current one may still train these tokens (the current one,
        where no staleness is allowed); whether it does is checked at dequeue, as for every group."""
        oldest = min(sample.oldest_version for sample in partials if sample.ids)
        return self.trainer_version - oldest <= max(self.rules.staleness_bound - 1, 0)
