"""What a simulation tells, and the account it is made from.

Invariants: only the window counts, from the end of the warm-up's last step to the end of the last step; shares are of
its seconds, summed over engines; the bound is of the very groups that got their fate in it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.control.ledger import Entry
from forebay.control.recorder import Ages
from forebay.control.types import Fate
from forebay.control.wire import StepReport
from forebay.simulation.bound import Bound, Work, bound_of
from forebay.simulation.engine import Engine
from forebay.simulation.model import Scenario


@dataclass(frozen=True)
class SimulationResult:
    """Of the steady steps, those after the warm-up. Seconds, tokens, policy versions."""

    step_times: NDArray[np.float64]
    """From one step's end to the next one's."""
    step_time_s: float
    """Their mean."""
    step_time_sd: float
    autocorrelation: float
    """Of the step times, lag 1; below 0 when long and short steps alternate. 0 if all are equal."""
    train_wait_ratio: float
    """Share of the time that the trainer waited for groups."""
    slots_idle: float
    """Share of decode slots x time without a response in them (padded rows of a static batch count as responses)."""
    engine_idle: float
    """Share of the engines' time without any response."""
    engine_paused: float
    """Share of the engines' time standing still for new weights, recomputation included."""
    staleness: Ages
    """Of trained groups, by their oldest token."""
    token_staleness: Ages
    """Of trained tokens."""
    queue_sd: float
    """Standard deviation over time of the queued groups, in batches."""
    tokens_per_s: float
    """Response tokens decoded by all engines."""
    fates: dict[str, int]
    """Of the whole simulation: admitted = trained + filtered + stale + failed + in_flight."""
    preempted_tokens: int
    """KV tokens given up since an engine's cache was full."""
    recomputed_tokens: int
    """Prompt and response tokens computed again, after refreshes and preemptions."""
    bound: Bound
    """Speed of light for the groups of these steps."""

    @property
    def over_bound(self) -> float:
        """Step time over its bound; 1 is perfect."""
        return self.step_time_s / self.bound.step_time_s


@dataclass(frozen=True)
class _Mark:
    """Sums over all engines until a moment."""

    time: float
    filled: float
    idle: float
    paused: float
    preempted: int
    recomputed: int
    tokens: int


class Statistics:
    """Listens to a simulation and adds up."""

    def __init__(self, scenario: Scenario, engines: Sequence[Engine]) -> None:
        self._scenario, self._engines = scenario, engines
        self._first = max(scenario.warm_up, 1)
        self._ends: list[float] = []
        self._waited = 0.0
        self._begin = _Mark(0.0, 0.0, 0.0, 0.0, 0, 0, 0)
        self._ages: Counter[int] = Counter()
        self._token_ages: Counter[int] = Counter()
        self._groups = self._trained = self._refreshes = 0
        self._lengths = self._squares = self._prompts = 0
        self._queued, self._queued_since = 0, 0.0
        self._queue_sum = self._queue_squares = 0.0

    @property
    def steady(self) -> bool:
        """Whether the warm-up is over."""
        return len(self._ends) >= self._first

    def settled(self, entry: Entry) -> None:
        """The ledger's sink."""
        if not self.steady:
            return
        trained = entry.trained_version if entry.fate is Fate.TRAINED else None
        if trained is None and entry.fate is not Fate.FILTERED:
            return
        tokens: dict[int, int] = {}  # by version
        for sample in entry.samples:
            length = len(sample.ids)
            self._lengths += length
            self._squares += length * length
            for span in sample.versions:
                version = span.version
                tokens[version] = tokens.get(version, 0) + span.end - span.start
        self._groups += 1
        self._prompts += len(entry.prompt.ids)
        if trained is not None:
            self._trained += 1
            self._age(trained, tokens)

    def _age(self, trained: int, tokens: dict[int, int]) -> None:
        """A group of so many tokens of each version is trained by this one."""
        if tokens:
            self._ages[trained - min(tokens)] += 1
        for version, count in tokens.items():
            self._token_ages[trained - version] += count

    def refreshed(self) -> None:
        """An engine serves new weights."""
        self._refreshes += self.steady

    def queued(self, now: float, groups: int) -> None:
        """The number of queued groups may have changed."""
        if groups == self._queued and self.steady:
            return
        self._count_queue(now)
        self._queued = groups

    def _count_queue(self, now: float) -> None:
        if self.steady:
            seconds = now - self._queued_since
            self._queue_sum += self._queued * seconds
            self._queue_squares += self._queued**2 * seconds
        self._queued_since = now

    def step(self, now: float, report: StepReport) -> None:
        """A step has ended."""
        self._count_queue(now)
        if self.steady:
            self._waited += report.train_wait_s
        self._ends.append(now)
        if len(self._ends) == self._first:
            self._begin = self._mark(now)

    def _mark(self, now: float) -> _Mark:
        used = [engine.account(now) for engine in self._engines]
        return _Mark(
            time=now,
            filled=sum(usage.filled for usage in used),
            idle=sum(usage.idle for usage in used),
            paused=sum(usage.paused for usage in used),
            preempted=sum(usage.preempted for usage in used),
            recomputed=sum(usage.recomputed for usage in used),
            tokens=sum(engine.load().tokens for engine in self._engines),
        )

    def result(self, fates: dict[str, int]) -> SimulationResult:
        """After the last step."""
        begin, end = self._begin, self._mark(self._ends[-1])
        seconds, count = end.time - begin.time, len(self._ends) - self._first
        times = np.diff(np.array(self._ends[self._first - 1 :]))
        engine_s = seconds * len(self._engines)
        queue_mean = self._queue_sum / seconds
        variance = max(self._queue_squares / seconds - queue_mean**2, 0.0)
        return SimulationResult(
            step_times=times,
            step_time_s=seconds / count,
            step_time_sd=float(times.std()),
            autocorrelation=autocorrelation(times),
            train_wait_ratio=self._waited / seconds,
            slots_idle=1 - (end.filled - begin.filled) / (engine_s * self._scenario.engine.slots),
            engine_idle=(end.idle - begin.idle) / engine_s,
            engine_paused=(end.paused - begin.paused) / engine_s,
            staleness=Ages.of(self._ages),
            token_staleness=Ages.of(self._token_ages),
            queue_sd=math.sqrt(variance) / self._scenario.rules.batch_groups,
            tokens_per_s=(end.tokens - begin.tokens) / seconds,
            fates=fates,
            preempted_tokens=end.preempted - begin.preempted,
            recomputed_tokens=end.recomputed - begin.recomputed,
            bound=bound_of(self._scenario, self._work(count)),
        )

    def _work(self, steps: int) -> Work:
        size = self._scenario.rules.group_size
        responses = self._groups * size
        return Work(
            generated=self._groups / steps,
            trained=self._trained / steps,
            group_size=size,
            length=self._lengths / responses,
            square_length=self._squares / responses,
            prompt_tokens=self._prompts / self._groups,
            longest=int(self._scenario.workload.lengths.max()),
            refreshes=self._refreshes / steps / self._scenario.engines,
        )


def autocorrelation(values: NDArray[np.float64]) -> float:
    """Of neighbours: sum of products of deviations over the sum of squares; 0 for constants."""
    deviations = values - values.mean()
    squares = float(deviations @ deviations)
    # Equal but for rounding is equal.
    if squares <= len(values) * (1e-9 * abs(float(values.mean()))) ** 2:
        return 0.0
    return float(deviations[1:] @ deviations[:-1]) / squares
