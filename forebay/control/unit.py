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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from forebay.control.controller import Batch, Controller, Engine, Group, Stage
from forebay.control.ledger import LedgerError
from forebay.control.recorder import Recorder
from forebay.control.types import EngineFailure, GenerationEngine, RequestRefused, Snapshot
from forebay.control.wire import SnapshotReport, StepReport
from forebay.errors import DataError, DeadlineError, ForebayError, RunError

QUEUE_PERIOD_S = 0.2
"""How often queue and flight are recorded."""
POLL_S = 20.0
"""Longest time that one request for a batch is held open."""


class Scorer(Protocol):
    """What the Control Unit knows of the reward workers."""

    async def score(self, responses: Sequence[tuple[Sequence[int], bool]], answer: str, prompt: str) -> Sequence[float]:
        """A reward for each (token ids, finished); raises `DataError` for the group's own fault."""


class Fleet(Protocol):
    """What the Control Unit knows of the rollout fleet."""

    @property
    def engines(self) -> Sequence[GenerationEngine]: ...

    async def restart(self, index: int) -> None:
        """End what is left of the engine and start it anew, with the start model."""


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
        stall_timeout_s: float,
        step_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.controller = controller
        self._fleet, self._scorer, self._recorder = fleet, scorer, recorder
        self.trainer_seen = False
        """Whether the trainer has asked for a batch."""
        self._seed, self._stall_timeout_s = seed, stall_timeout_s
        self._step_timeout_s = step_timeout_s
        self._restarts_left = max_restarts
        self._snapshot: Snapshot | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovering: set[int] = set()
        self._last_progress = time.monotonic()
        self._over: asyncio.Future[None] | None = None

    # ---- for the owner

    async def run(self, trainer_alive: Callable[[], None]) -> None:
        """Until the last step is trained; raises what ended the run early. `trainer_alive` raises if it died."""
        self._over = asyncio.get_running_loop().create_future()
        self._last_progress = time.monotonic()
        for index in range(len(self._fleet.engines)):
            self.controller.engine_joined(index, 0)
        self._spawn(self._watch(trainer_alive))
        self._pump()
        try:
            await self._over
        finally:
            await self._end_tasks()

    # ---- for the server

    @property
    def is_over(self) -> bool:
        """Whether the last step is trained or the run has ended with an error."""
        return self.controller.finished or (self._over is not None and self._over.done())

    async def next_batch(self, step: int) -> Batch | None:
        """The batch of a step, or None after `POLL_S` or at the end of the run."""
        self.trainer_seen = True
        deadline = time.monotonic() + POLL_S
        async with self._changed:
            while True:
                if self.is_over:
                    return None
                batch = self.controller.next_batch(step)
                self._pump()
                if batch is not None:
                    self._progress()
                    return batch
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)

    async def step_trained(self, report: StepReport) -> None:
        """A step is done. A report that comes twice (its answer was lost) counts once."""
        if report.step == self.controller.steps_trained:
            return
        batch = self.controller.next_batch(report.step)
        if batch is None:
            raise RunError(f"control: step {report.step} was reported before its batch was taken")
        try:
            self.controller.step_trained(report.step)
        except LedgerError as error:
            self.fail(error)
            raise
        self._recorder.step(report, batch, self.controller)
        await self._wake()
        self._progress()
        if self.controller.finished and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def snapshot_published(self, report: SnapshotReport) -> None:
        """New weights can be loaded. A report that comes twice counts once."""
        if report.version == self.controller.published:
            return
        self.controller.snapshot_published(report.version)
        self._snapshot = Snapshot(report.version, report.path, report.manifest_sha256)
        self._progress()
        await self._wake()

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
            "engines": {key: engine.version for key, engine in controller.engines.items()},
            "fates": controller.ledger.fates(),
        }

    # ---- decisions carried out

    def _pump(self) -> None:
        """Carry out every decision that is open now; none once the run is over, since nobody would end it."""
        if self.is_over:
            return
        while (dispatch := self.controller.next_dispatch()) is not None:
            for group in dispatch.groups:
                self._spawn(self._generate(group, group.attempts, dispatch.engine))
        index = self.controller.next_refresh()
        if index is not None and index not in self._recovering and self._snapshot is not None:
            self.controller.refresh_started(index)
            self._spawn(self._refresh(index, self.controller.engines[index], self._snapshot))

    async def _generate(self, group: Group, attempt: int, index: int) -> None:
        rules = self.controller.rules
        seed = (self._seed * 1_000_003 + group.group_id) * 101 + attempt
        try:
            samples = await self._fleet.engines[index].generate(group.prompt.ids, rules.group_size, seed)
        except EngineFailure as failure:
            if self.controller.generation_failed(group.group_id, attempt):
                await self._recover(index, failure)
            await self._wake()
        except RequestRefused as refusal:
            self.controller.refused(group.group_id, attempt, str(refusal))
            await self._wake()
        else:
            if self.controller.generated(group.group_id, attempt, tuple(samples)):
                self._recorder.generated(samples)
                await self._wake()
                await self._score(group)

    async def _score(self, group: Group) -> None:
        responses = [(sample.ids, sample.finish_reason == "stop") for sample in group.samples]
        try:
            rewards = await self._scorer.score(responses, group.prompt.answer, group.prompt.text)
        except DataError as fault:
            self.controller.scoring_failed(group.group_id, str(fault))
        else:
            self.controller.scored(group.group_id, tuple(float(reward) for reward in rewards))
            self._progress()
        await self._wake()

    async def _refresh(self, index: int, engine: Engine, snapshot: Snapshot) -> None:
        try:
            record = await self._fleet.engines[index].refresh(snapshot)
        except (EngineFailure, RequestRefused) as failure:  # a refresh that is refused is the engine's fault too
            if self.controller.engines.get(index) is engine:
                await self._recover(index, failure)
            return
        if self.controller.engines.get(index) is engine:
            self.controller.refresh_done(index, record.version)
            self._recorder.refreshed(index, record)
            self._progress()
        await self._wake()

    async def _recover(self, index: int, failure: ForebayError) -> None:
        """Take the engine out, start it anew, bring it to the newest snapshot, give it work again."""
        self._recovering.add(index)
        self.controller.engine_lost(index)
        version: int | None = None
        while version is None:
            self._recorder.event("engine_lost", engine=index, reason=str(failure))
            await self._wake()
            if self._restarts_left <= 0:
                raise RunError(f"engine {index} failed and no restart is left (generation.max_restarts): {failure}")
            self._restarts_left -= 1
            try:
                await self._fleet.restart(index)
                version = await self._catch_up(index)
            except RunError as again:
                failure = again
        self._recovering.discard(index)
        self.controller.engine_joined(index, version)
        self._recorder.event("engine_joined", engine=index, version=version)
        self._progress()
        await self._wake()

    async def _catch_up(self, index: int) -> int:
        version = 0
        while self._snapshot is not None and version < self._snapshot.version:
            version = (await self._fleet.engines[index].refresh(self._snapshot)).version
        return version

    # ---- time

    async def _watch(self, trainer_alive: Callable[[], None]) -> None:
        """Record the queue, notice a dead trainer, end a run that makes no progress."""
        while True:
            await asyncio.sleep(QUEUE_PERIOD_S)
            self._recorder.queue(self.controller)
            trainer_alive()
            idle = time.monotonic() - self._last_progress
            holds = self.controller.training_step is not None
            if idle > (max(self._stall_timeout_s, self._step_timeout_s) if holds else self._stall_timeout_s):
                raise DeadlineError(
                    f"control: no progress for {idle:.0f} s (control.stall_timeout_s): {self._culprit()}"
                )

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

    def _progress(self) -> None:
        self._last_progress = time.monotonic()

    # ---- plumbing

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

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
