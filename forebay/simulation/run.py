"""The event loop: a shell around the real `Controller`, as `forebay.control.unit` is one, under a virtual clock.

Invariants:
- It carries out decisions (`next_dispatch`, `next_batch` / `next_groups`, `next_refresh`) and reports what happened. No
  rule of admission, staleness, dispatch, credits or refresh order is written here.
- After an event comes what the real shell does: dispatch until nothing starts, refresh, let a waiting trainer ask.
- The same scenario gives the same result.
"""

import contextlib
import gc
import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, overload

from forebay.control.controller import DEADLINES_ALLOWED, Controller, Dispatch, Group, Stage
from forebay.control.ledger import Entry
from forebay.control.open_groups import FRUITLESS
from forebay.control.recorder import Recorder
from forebay.control.source import Minibatch, scheduled
from forebay.control.types import NOTHING, Prompt, RefreshRecord, Sample
from forebay.control.unit import QUEUE_PERIOD_S
from forebay.errors import RunError, UserError
from forebay.simulation.engine import Engine
from forebay.simulation.model import Scenario, Workload
from forebay.simulation.progress import Progress
from forebay.simulation.responses import Job, Response, Swap
from forebay.simulation.result import SimulationResult, Statistics
from forebay.simulation.trainer import Phase, Trainer

__all__ = ["SimulationResult", "simulate"]

LAUNCH_TICKS = 512
"""Most moments at which a part of the first wave is let out."""


def simulate(
    scenario: Scenario,
    folder: Path | None = None,
    observe_s: float = QUEUE_PERIOD_S,
    progress: Progress | None = None,
) -> SimulationResult:
    """Play a scenario until its last step is trained. It is cut off there in full flow, as if many steps followed: how
    the pipeline empties at the end of a run is no part of what is measured.

    With a `folder`, the files of a run are written there (`forebay.control.recorder`), times being virtual and the
    engines observed every `observe_s` seconds. `progress` is told how far it is. Raises `RunError` if the rules let
    nothing go on, `UserError` if no group keeps its deadline.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_collection())
        simulation = Simulation(scenario, progress)
        if folder is not None:
            recorder = Recorder(folder, lambda record: None, lambda: simulation.now)
            simulation.record(stack.enter_context(contextlib.closing(recorder)), observe_s)
        return simulation.run()


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, progress: Progress | None = None) -> None:
        rules = scenario.rules
        self._progress = progress or Progress("")
        beyond = (rules.staleness_bound + 1) * rules.sync_every + rules.require_batches
        self.now = 0.0
        self._scenario = scenario
        self._engines = [Engine(scenario.engine) for _ in range(scenario.engines)]
        self._refresh_began = [0.0] * scenario.engines
        # What stands for the tokens of a response; one for all of a length.
        self._ids = [range(length) for length in range(int(scenario.workload.lengths.max()) + 1)]
        self._statistics = Statistics(scenario, self._engines)
        source = scheduled(_Prompts(scenario), scenario.seed, scenario.sorted_steps)
        # Steps that are never reached keep the pipeline full to the end.
        self._controller = Controller(
            replace(rules, steps=rules.steps + beyond), source, self._settled, scenario.streaming
        )
        self._trainer = Trainer(scenario.trainer, self._controller, scenario.streaming)
        self._recorder: Recorder | None = None
        # When, serial number, what happens then; None: this engine is fired.
        self._heap: list[tuple[float, int, Callable[[], None] | None, int]] = []
        self._pushed = 0
        self._late = 0  # attempts in a row that were given up
        self._random = random.Random(scenario.seed)
        self._nothing = (NOTHING,) * rules.group_size
        self._teaching = (1.0,) + (0.0,) * (rules.group_size - 1)
        self._alike = (0.0,) * rules.group_size

    def record(self, recorder: Recorder, observe_s: float) -> None:
        """Write down what a Control Unit would."""
        self._recorder = recorder
        self._later(observe_s, self._observe, observe_s)

    def run(self) -> SimulationResult:
        """Until the last step."""
        controller, heap, last = self._controller, self._heap, self._scenario.rules.steps
        for index in range(len(self._engines)):
            controller.engine_joined(index, 0)
        self._let_out()
        self._wake()
        while controller.steps_trained < last:
            if not heap:
                raise RunError(
                    f"simulation: nothing goes on after step {controller.steps_trained}: no rule lets another group "
                    "start, and the groups that are ready are too few for a batch; look at control.work_in_progress, "
                    "control.max_staleness and control.queue"
                )
            self.now, _, happen, index = heap[0]
            if happen is None:
                self._fire(index)
            else:
                heapq.heappop(heap)
                happen()
        return self._statistics.result(controller.ledger.fates())

    # ---- decisions carried out

    def _pump(self) -> None:
        controller = self._controller
        while (dispatch := controller.next_dispatch()) is not None:
            self._start(dispatch)
        while (index := controller.next_refresh()) is not None:
            controller.refresh_started(index)
            self._refresh_began[index] = self.now
            self._later(self._scenario.refresh_s, self._refresh, index, controller.published)

    def _wake(self) -> None:
        """Decide again, and let a waiting trainer ask."""
        self._pump()
        controller = self._controller
        if self._trainer.phase is Phase.WAITING:
            done = self._trainer.ask(self.now)
            if done is not None:
                self._at(done, self._trained)
            self._pump()
        self._statistics.queued(self.now, controller.count(Stage.QUEUED))

    def _start(self, dispatch: Dispatch) -> None:
        responses: list[Response] = []
        deadline = self._scenario.group_deadline_s
        for group in dispatch.groups:
            if self._recorder:
                self._recorder.dispatched(group)
            asked = self._responses(group)
            responses += asked
            if deadline is not None:
                self._later(deadline, self._overdue, dispatch.engine, asked[0][0], deadline)
        engine = self._engines[dispatch.engine]
        engine.submit(self.now, responses)
        self._expect(dispatch.engine, engine.due)

    def _responses(self, group: Group) -> list[Response]:
        """What is asked of an engine for a group: each response from its prefix on, unless that is finished."""
        lengths = self._scenario.workload.lengths[_row(group.prompt)].tolist()
        wholes = tuple([self._ids[length] for length in lengths])
        prefixes = group.samples or self._nothing
        places = [place for place, prefix in enumerate(prefixes) if prefix.finish_reason is None]
        moments = array("q", bytes(8 * len(wholes)))
        job = Job(group, group.attempts, len(group.prompt.ids), wholes, prefixes, moments, len(places))
        return [(job, place) for place in places]

    # ---- what happens

    def _fire(self, index: int) -> None:
        """The first event of the heap: an engine is due. Its next one takes the place at once."""
        engine, heap = self._engines[index], self._heap
        if engine.due != self.now:
            heapq.heappop(heap)
            return  # planned anew since
        finished, complete = engine.fire(), []
        if engine.due == math.inf:
            heapq.heappop(heap)
        else:
            self._pushed += 1
            heapq.heapreplace(heap, (engine.due, self._pushed, None, index))
        opens, sample_finished = False, self._controller.sample_finished
        for job, place in finished:
            job.unfinished -= 1
            if not job.unfinished:
                complete.append(job)
            elif sample_finished(job.group.group_id, job.attempt, job.wholes[place].stop):
                opens = True
        if engine.swap is not None:
            self._swapped(index, engine.swap)
            opens = True
        for job in complete:
            self._generated(job, engine.samples(job))
        if opens and not complete:
            self._pump()

    def _generated(self, job: Job, samples: tuple[Sample, ...]) -> None:
        group, self._late = job.group, 0
        self._progress.groups += 1
        self._controller.generated(group.group_id, job.attempt, samples)
        if self._recorder:
            self._recorder.generated(group)
        self._pump()
        if self._scenario.reward_s:
            self._later(self._scenario.reward_s, self._scored, group)
        else:
            self._scored(group)

    def _overdue(self, index: int, job: Job, deadline: float) -> None:
        """Its time is over, unless it is finished or was interrupted before."""
        group, engine = job.group, self._engines[index]
        if self._controller.open.generating(group.group_id, job.attempt) is None:
            return
        self._late += 1
        if self._late > DEADLINES_ALLOWED * max(4 * self._scenario.rules.batch_groups, FRUITLESS):
            raise UserError(
                f"simulation: no group is generated within control.group_deadline_s ({deadline:g} s): raise it"
            )
        engine.drop(self.now, job)
        self._expect(index, engine.due)
        self._controller.deadline_passed(group.group_id, job.attempt, deadline)
        self._pump()

    def _scored(self, group: Group) -> None:
        teaching = self._scenario.teaching == 1 or self._random.random() < self._scenario.teaching
        if self._recorder:
            self._recorder.scored(group)
        self._controller.scored(group.group_id, self._teaching if teaching else self._alike)
        self._wake()

    def _trained(self) -> None:
        """The trainer is done with the groups that it had."""
        end = self._trainer.close(self.now)
        if end is None:
            self._wake()
        else:
            self._at(end, self._stepped)

    def _stepped(self) -> None:
        controller, published = self._controller, self._trainer.is_published
        report = self._trainer.report(self.now)
        total = report.train_wait_s + report.train_s + report.publish_s
        batch = controller.step_trained(report.step, report.train_wait_s / total if total else 0.0)
        self._statistics.step(self.now, report)
        self._progress.done = report.step
        if self._recorder and batch is not None:
            self._recorder.step(report, batch, controller)
        self._pump()
        if published:
            controller.snapshot_published(controller.published + 1)
        controller.checkpointed(report.step)
        self._wake()

    def _refresh(self, index: int, version: int) -> None:
        """The new weights are there, beside the engine's old ones."""
        engine = self._engines[index]
        engine.refresh(self.now, self._scenario.rules.refresh, version)
        self._expect(index, engine.due)

    def _swapped(self, index: int, swap: Swap) -> None:
        for job, partials in swap.aborted:
            self._controller.aborted(job.group.group_id, job.attempt, partials)
        self._at(swap.answered, self._refreshed, index, swap)

    def _refreshed(self, index: int, swap: Swap) -> None:
        self._controller.refresh_done(index, swap.version)
        self._statistics.refreshed()
        if self._recorder:
            record = RefreshRecord(
                swap.version, swap.answered - swap.began, swap.tokens_recomputed, swap.tokens_discarded
            )
            self._recorder.refreshed(index, record, self.now - self._refresh_began[index])
        self._wake()

    def _settled(self, entry: Entry) -> None:
        self._statistics.settled(entry)
        if self._recorder:
            self._recorder.settled(entry)

    def _let_out(self) -> None:
        """Let out the part of the first wave that is due."""
        wave, controller = self._scenario.first_wave_s, self._controller
        share = min(self.now / wave, 1.0) if wave else 1.0
        ticks = min(max(math.ceil(controller.credits.groups), 1), LAUNCH_TICKS) if share == 0 else 0
        controller.launched(share)
        for tick in range(1, ticks + 1):
            self._at(wave * tick / ticks, self._launch)

    def _launch(self) -> None:
        self._let_out()
        self._pump()

    def _observe(self, period: float) -> None:
        if self._recorder and self._heap:  # nothing to come: the loop says so
            for engine in self._engines:
                engine.account(self.now)
            self._recorder.queue(self._controller, [engine.load() for engine in self._engines])
            self._later(period, self._observe, period)

    # ---- plumbing

    def _expect(self, index: int, due: float) -> None:
        """See to it that the engine is fired when it is due. What it was due for before is in vain, and harmless."""
        if due != math.inf:
            self._pushed += 1
            heapq.heappush(self._heap, (due, self._pushed, None, index))

    def _later(self, delay: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._at(self.now + delay, happen, *arguments)

    def _at(self, when: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, partial(happen, *arguments), -1))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the search for cyclic garbage: there is none, and searching takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Prompts(Sequence[Sequence[Minibatch]]):
    """The order as batch groups of minibatches of prompts, made when they are asked for."""

    def __init__(self, scenario: Scenario) -> None:
        self._order, self._workload = scenario.order, scenario.workload

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Sequence[Minibatch]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[Minibatch]]: ...

    def __getitem__(self, index: int | slice) -> Sequence[Minibatch] | Sequence[Sequence[Minibatch]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return [tuple(_prompt(self._workload, row) for row in minibatch) for minibatch in self._order[index]]


def _prompt(workload: Workload, row: int) -> Prompt:
    tokens = _tokens(int(workload.prompt_tokens[row]))
    return Prompt(f"p{row:07d}", tokens, "", "null", float(workload.predicted[row]))


def _row(prompt: Prompt) -> int:
    return int(prompt.prompt_id[1:])


@lru_cache(maxsize=4096)
def _tokens(count: int) -> tuple[int, ...]:
    return tuple(range(count))
