"""The Control Unit: an asyncio shell around `Controller`. It carries out decisions and reports events.

Invariants:
- Only this event loop touches the controller; every event is followed by `_wake`, every decision by its task.
- An engine failure never becomes a reward: the groups wait for another engine, the engine is brought back to the
  newest snapshot before it gets work again.
- Every wait has a deadline: `stall_timeout_s` without progress ends the run and names who was waited for.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay.control.controller import Batch, Controller, Engine, Group, Stage
from forebay.control.ledger import LedgerError
from forebay.control.recorder import Recorder
from forebay.control.types import (
    EngineFailure,
    Examination,
    Fleet,
    GenerationAborted,
    RequestRefused,
    Scorer,
    Snapshot,
)
from forebay.control.wire import CheckpointReport, SnapshotReport, StepReport
from forebay.errors import DataError, DeadlineError, ForebayError, RunError

QUEUE_PERIOD_S = 0.2
"""How often queue and flight are recorded."""
LAUNCH_PERIOD_S = 0.05
"""How often the first wave is let out further."""
POLL_S = 20.0
"""Longest time that one request for a batch is held open."""
STRIKES = 3
"""Failures in a row after which an engine that says it is healthy is restarted all the same."""
LONGEST_BACKOFF_S = 30.0
"""Longest wait before the restart of an engine."""

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Patience:
    """Times that the Control Unit keeps to: what it bears before it acts."""

    stall_timeout_s: float
    """Without any progress the run ends."""
    step_timeout_s: float
    """While the trainer holds a step, this long if it is longer."""
    max_restarts: int
    """Of engines, all together; one more ends the run."""
    group_deadline_s: float | None = None
    """A group that is generated for longer is made afresh."""
    first_wave_s: float = 0.0
    """Seconds over which the first groups are let out."""
    backoff_s: float = 1.0
    """Wait before the first restart of an engine; it doubles with each, up to `LONGEST_BACKOFF_S`."""


class ControlUnit:
    """Runs one training: dispatches, scores, queues, serves the trainer, refreshes engines."""

    def __init__(
        self,
        controller: Controller,
        fleet: Fleet,
        scorer: Scorer,
        recorder: Recorder,
        *,
        seed: int,
        patience: Patience,
        examination: Examination | None = None,
    ) -> None:
        self.controller = controller
        self.engine_restarts = 0
        self.trainer_seen = False
        """Whether the trainer has asked for a batch."""
        self._fleet, self._scorer, self._recorder = fleet, scorer, recorder
        self._examination = examination
        self._seed, self._patience = seed, patience
        self._snapshot: Snapshot | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovering: set[int] = set()
        self._strikes: Counter[int] = Counter()
        self._last_progress = time.monotonic()
        self._over: asyncio.Future[None] | None = None

    # ---- for the owner

    async def run(self, check_trainer: Callable[[], None]) -> None:
        """Until the last step is trained; raises what ended the run early. `check_trainer` raises if it is lost."""
        self._over = asyncio.get_running_loop().create_future()
        self._last_progress = time.monotonic()
        for index in range(len(self._fleet.engines)):
            self.controller.engine_joined(index, 0)
            self._examine(index, 0)
        self._spawn(self._watch(check_trainer, launched=self._let_out(0.0)))
        try:
            await self._over
        finally:
            await self._end_tasks()
            await self._wake()  # a trainer that waits for groups hears at once that none will come

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    # ---- for the server

    @property
    def is_over(self) -> bool:
        """Whether the last step is trained or the run has ended with an error."""
        return self.controller.finished or (self._over is not None and self._over.done())

    def refuses(self, step: int) -> bool:
        """Whether nothing will come for this step any more. A trainer that died with the last steps in no checkpoint
        is served them again."""
        over = self._over
        failed = over is not None and over.done() and (over.cancelled() or over.exception() is not None)
        return failed or (self.controller.finished and step > self.controller.steps_trained)

    async def next_batch(self, step: int) -> Batch | None:
        """The whole batch of a step, or None after `POLL_S` or at the end of the run."""
        return await self._wait_for(step, lambda: self.controller.next_batch(step))

    async def next_groups(self, step: int, received: int) -> tuple[Batch, bool] | None:
        """The groups of a step after the first `received`, and whether that is all; None as `next_batch`."""
        return await self._wait_for(step, lambda: self.controller.next_groups(step, received))

    async def step_trained(self, report: StepReport) -> None:
        """A step is done. A report that comes twice (its answer was lost, or the trainer was) counts once."""
        total = report.train_wait_s + report.train_s + report.publish_s
        try:
            batch = self.controller.step_trained(report.step, report.train_wait_s / total if total else 0.0)
        except LedgerError as error:
            self.fail(error)
            raise
        if batch is None:
            return
        self._recorder.step(report, batch, self.controller)
        self._progress()
        await self._wake()
        if self.controller.finished and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def snapshot_published(self, report: SnapshotReport) -> None:
        """New weights can be loaded. A report that comes twice counts once."""
        if self.controller.snapshot_published(report.version):
            self._snapshot = Snapshot(report.version, report.path, report.manifest_sha256)
            self._progress()
            await self._wake()

    def checkpointed(self, report: CheckpointReport) -> None:
        """The trainer can go on from after this step."""
        self.controller.checkpointed(report.step)

    def status(self) -> dict[str, Any]:
        """For people and probes."""
        controller = self.controller
        return {
            "step": controller.steps_trained,
            "steps": controller.rules.steps,
            "version": controller.published,
            "queued": controller.count(Stage.QUEUED),
            "generating": controller.count(Stage.GENERATING),
            "training_step": controller.training_step,
            "credits": controller.credits.batches,
            "engines": {key: engine.version for key, engine in controller.engines.items()},
            "fates": controller.ledger.fates(),
            "verdicts": dict(self._recorder.verdicts),
        }

    # ---- decisions carried out

    def _pump(self) -> None:
        """Carry out every decision that is open now; none once the run is over, since nobody would end it."""
        if self.is_over:
            return
        while (dispatch := self.controller.next_dispatch()) is not None:
            for group in dispatch.groups:
                self._recorder.dispatched(group)
                self._spawn(self._generate(group, group.attempts, dispatch.engine))
        while self._snapshot is not None and (index := self.controller.next_refresh()) is not None:
            self.controller.refresh_started(index)
            self._spawn(self._refresh(index, self.controller.engines[index], self._snapshot))

    async def _generate(self, group: Group, attempt: int, index: int) -> None:
        seed = (self._seed * 1_000_003 + group.group_id) * 101 + attempt
        engine, limit = self._fleet.engines[index], self._patience.group_deadline_s
        try:
            async with asyncio.timeout(limit) as timer:
                samples = await engine.generate(
                    group.prompt.ids,
                    group.prefixes,
                    seed,
                    lambda tokens: self._response_ended(group.group_id, attempt, tokens),
                    group.prompt.images,
                )
        except TimeoutError:
            if limit is None or not timer.expired():
                raise
            self.controller.deadline_passed(group.group_id, attempt, limit)
        except GenerationAborted as stop:
            self.controller.aborted(group.group_id, attempt, stop.partials)
        except EngineFailure as failure:
            if self.controller.generation_failed(group.group_id, attempt, failure.partials):
                await self._engine_failed(index, failure)
        except RequestRefused as refusal:
            self.controller.refused(group.group_id, attempt, str(refusal))
        else:
            self._strikes.pop(index, None)
            if self.controller.generated(group.group_id, attempt, tuple(samples)):
                self._recorder.generated(group)
                await self._wake()
                await self._score(group)
        await self._wake()

    def _response_ended(self, group_id: int, attempt: int, tokens: int) -> None:
        self.controller.sample_finished(group_id, attempt, tokens)
        self._pump()  # its slot is free

    async def _score(self, group: Group) -> None:
        responses = [(sample.ids, sample.finish_reason == "stop") for sample in group.samples]
        try:
            prompt = group.prompt
            rewards = await self._scorer.score(responses, prompt.answer, prompt.text, prompt.verifier)
        except DataError as fault:
            self.controller.scoring_failed(group.group_id, str(fault))
        else:
            self._recorder.scored(group)
            self.controller.scored(group.group_id, tuple(float(reward) for reward in rewards))
            self._progress()

    async def _refresh(self, index: int, engine: Engine, snapshot: Snapshot) -> None:
        begin = time.monotonic()
        try:
            record = await self._fleet.engines[index].refresh(snapshot, self.controller.rules.refresh)
        except (EngineFailure, RequestRefused) as failure:  # a refresh that is refused is the engine's fault too
            if self.controller.engines.get(index) is engine:
                await self._refresh_failed(index, engine, failure)
            return
        self._strikes.pop(index, None)
        if self.controller.engines.get(index) is engine:
            self.controller.refresh_done(index, record.version)
            self._recorder.refreshed(index, record, time.monotonic() - begin)
            self._examine(index, record.version)
            self._progress()
        await self._wake()

    def _examine(self, index: int, version: int) -> None:
        if self._examination is not None and self._examination.is_due(version):
            self.controller.hold(index, True)  # at once: newer weights may be there, and the engine may be lost
            self._spawn(self._examined(self._examination, index, self.controller.engines[index], version))

    async def _examined(self, examination: Examination, index: int, engine: Engine, version: int) -> None:
        await examination.examine(index, version)
        if self.controller.engines.get(index) is engine:  # else it was started anew, and is not held
            self.controller.hold(index, False)
        self._progress()
        await self._wake()

    async def _engine_failed(self, index: int, failure: EngineFailure) -> None:
        """One call failed: bear it from an engine that is in order otherwise, else recover the engine."""
        if index not in self.controller.engines:
            return
        self._strikes[index] += 1
        if self._strikes[index] < STRIKES and await self._fleet.in_order(index):
            self._recorder.event("call_failed", engine=index, reason=str(failure))
        elif index in self.controller.engines:
            await self._recover(index, failure)

    async def _refresh_failed(self, index: int, engine: Engine, failure: ForebayError) -> None:
        """An engine that still serves its old weights may try again (a newer snapshot may have replaced the one that
        it was reading); one that does not is recovered."""
        self._strikes[index] += 1
        if self._strikes[index] < STRIKES and await self._fleet.in_order(index):
            self._recorder.event("refresh_failed", engine=index, reason=str(failure))
            if self.controller.engines.get(index) is engine:
                self.controller.refresh_failed(index)
                await self._wake()
        elif self.controller.engines.get(index) is engine:
            await self._recover(index, failure)

    async def _recover(self, index: int, failure: ForebayError) -> None:
        """Take the engine out, start it anew, bring it to the newest snapshot, give it work again."""
        self.controller.engine_lost(index)
        self._recovering.add(index)
        self._strikes.pop(index, None)
        version: int | None = None
        while version is None:
            self._recorder.event("engine_lost", engine=index, reason=str(failure))
            await self._wake()
            if self.engine_restarts >= self._patience.max_restarts:
                raise RunError(f"engine {index} failed and no restart is left (generation.max_restarts): {failure}")
            await asyncio.sleep(min(self._patience.backoff_s * 2.0**self.engine_restarts, LONGEST_BACKOFF_S))
            self.engine_restarts += 1
            try:
                await self._fleet.restart(index)
                version = await self._catch_up(index)
            except (RunError, RequestRefused) as again:
                failure = again
        self._recovering.discard(index)
        self.controller.engine_joined(index, version)
        self._recorder.event("engine_joined", engine=index, version=version)
        self._progress()
        await self._wake()

    async def _catch_up(self, index: int) -> int:
        version = failures = 0
        while (snapshot := self._snapshot) is not None and version < snapshot.version:
            try:
                version = (await self._fleet.engines[index].refresh(snapshot, "retract")).version
            except (EngineFailure, RequestRefused):
                failures += 1
                # While it read that snapshot, newer ones may have replaced it.
                if failures == STRIKES or self._snapshot is snapshot or not await self._fleet.in_order(index):
                    raise
        return version

    # ---- time

    async def _watch(self, check_trainer: Callable[[], None], launched: bool) -> None:
        """Record the queue, look after the trainer, end a run that makes no progress."""
        begin = time.monotonic()
        while True:
            await asyncio.sleep(QUEUE_PERIOD_S if launched else LAUNCH_PERIOD_S)
            self._recorder.queue(self.controller, [engine.load() for engine in self._fleet.engines])
            check_trainer()
            if not launched:
                launched = self._let_out(time.monotonic() - begin)
            idle = time.monotonic() - self._last_progress
            limit = self._patience.stall_timeout_s
            if self.controller.training_step is not None:
                limit = max(limit, self._patience.step_timeout_s)
            if idle > limit:
                raise DeadlineError(
                    f"control: no progress for {idle:.0f} s (control.stall_timeout_s): {self._culprit()}"
                )

    def _let_out(self, elapsed_s: float) -> bool:
        """Let out the part of the first wave that is due; whether that is all of it."""
        wave = self._patience.first_wave_s
        share = min(elapsed_s / wave, 1.0) if wave else 1.0
        self.controller.launched(share)
        self._pump()
        return share >= 1.0

    def _culprit(self) -> str:
        controller = self.controller
        if controller.training_step is not None:
            return f"the trainer holds step {controller.training_step} and has not reported it"
        if self._recovering:
            return f"engine {min(self._recovering)} is being restarted"
        refreshing = [key for key, engine in controller.engines.items() if engine.refreshing]
        if refreshing:
            return f"engine {refreshing[0]} is loading version {controller.published}"
        if controller.count(Stage.GENERATING):
            busy = [key for key, engine in controller.engines.items() if engine.groups]
            return f"{controller.count(Stage.GENERATING)} groups are being generated by engines {busy}, none comes back"
        if controller.count(Stage.SCORING):
            return f"{controller.count(Stage.SCORING)} groups wait for their rewards"
        return f"the trainer has not asked for step {controller.steps_trained + 1}"

    # ---- plumbing

    async def _wait_for(self, step: int, ask: Callable[[], AnswerT | None]) -> AnswerT | None:
        self.trainer_seen = True
        deadline = time.monotonic() + POLL_S
        async with self._changed:
            while not self.refuses(step):
                answer = ask()
                self._pump()
                if answer is not None:
                    self._progress()
                    return answer
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        return None

    def _progress(self) -> None:
        """The run came nearer to its end; what fails again and again is no progress."""
        self._last_progress = time.monotonic()

    async def _wake(self) -> None:
        """Something happened: decide again, and let the waiting trainer look."""
        self._pump()
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task's unexpected error ends the run with that error."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
