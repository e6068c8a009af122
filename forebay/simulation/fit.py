"""Least squares for the costs of decoding, from what a run recorded of its groups and engines.

The seconds that an engine takes are linear in the costs asked for (`EngineModel`), whatever stretch of time it is:

    seconds - pauses = latency + a steps + b tokens + c (context x steps) + prefill (prompt and recomputed tokens)

- *Windows* between observations: the active responses N tell the steps, tokens / N. Good when nearly the same responses
  are there at both ends, or N is known anyway, because the engine is full.
- *Lives* of groups, from dispatch to the last response: the longest response tells the decode steps exactly, and the
  other groups of the engine, each decoded at an even pace over its own life, tell tokens and context. Good when
  responses come and go between two observations, and each gets its slot at once.

Costs are not negative. If a run hardly varied the number of active responses, a and b N cannot be told apart: then the
fit holds near that N, not far from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.optimize import nnls

from forebay.control.types import EngineLoad
from forebay.telemetry.metrics import Record

FULL = 0.9
"""Of its slots: an engine that has more responses on the average is full."""
LONG = 20
"""Windows in a mean life, from which windows serve better than lives."""
AT_ONCE_S = 1e-3
"""Groups that were started within this time of each other were started together."""
LEAST_ROWS = 8
TOGETHER = 4
"""Windows in one row: the tokens of one are known only to within what a stream delivers at once."""
MOST_ROWS = 200
"""Windows are put together into no more rows of one engine than this."""
STANDSTILL = 0.5
"""Of the most prompt and recomputed tokens in a window: the time that more than these take may be in the next one."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class EngineCosts:
    """Coefficients of an `EngineModel`. Seconds."""

    a: float
    b: float
    c: float
    prefill_s: float
    pause_s: float
    latency_s: float
    """Of a group's request and answer, beyond decoding."""
    error: float
    """Root mean square of what the fit leaves unexplained, over the mean of what it explains."""


@dataclass(frozen=True)
class Lives:
    """Groups that one engine generated at one go, in the order of their start. G groups of n responses."""

    begin: Array
    """[G] seconds."""
    end: Array
    """[G]."""
    lengths: Array
    """[G, n]."""
    prompt_tokens: float
    complete: float
    """Until this moment all groups of the engine are among them."""


def engine_costs(
    lives: Sequence[Lives], observed: Sequence[Record], refreshes: Sequence[Record], slots: int
) -> EngineCosts | None:
    """From one `Lives` an engine and the run's `queue` and `refresh` records; None if they are too few."""
    halts = [_Halts([record for record in refreshes if record["engine"] == engine]) for engine in range(len(lives))]
    if _are_windows_good(lives, observed, slots):
        parts = [
            _put_together(_window_rows(observed, engine, own, halt, slots))
            for engine, (own, halt) in enumerate(zip(lives, halts, strict=True))
        ]
        table = np.concatenate(parts)
    else:
        table = np.concatenate([_life_rows(own, halt) for own, halt in zip(lives, halts, strict=True)])
    if len(table) < LEAST_ROWS:
        return None
    costs, seconds = table[:, :-1], table[:, -1]
    latency, a, b, c, prefill = found = not_negative(costs, seconds)
    left = costs @ np.array(found) - seconds
    pause = float(np.mean([record["pause_s"] for record in refreshes])) if refreshes else 0.0
    return EngineCosts(a, b, c, prefill, pause, latency, float(np.sqrt(np.mean(left**2)) / seconds.mean()))


def lives_of(ledger: pa.Table, engine: int, prompt_tokens: float) -> Lives:
    """From a ledger: the finished groups that this engine alone generated, in one attempt."""
    last = pc.list_element(ledger["engines"], 0)
    single = pc.and_(pc.equal(ledger["attempts"], 1), pc.and_(pc.equal(last, engine), pc.is_valid(ledger["scored_t"])))
    rows = ledger.filter(single).sort_by("admitted_t")
    size = max((len(lengths) for lengths in rows["lengths"].to_pylist()), default=1)
    return Lives(
        rows["admitted_t"].to_numpy(),
        rows["finished_t"].to_numpy(),
        np.array(rows["lengths"].to_pylist(), dtype=np.float64).reshape(-1, size),
        prompt_tokens,
        _complete_until(ledger),
    )


def not_negative(columns: Array, values: Array) -> list[float]:
    """Least squares with coefficients from 0 on. Columns are scaled, so that none is lost to rounding."""
    scale = np.maximum(np.sqrt((columns**2).mean(axis=0)), 1e-300)
    found, _ = nnls(columns / scale, values)
    return [float(value) for value in found / scale]


def _complete_until(ledger: pa.Table) -> float:
    """Groups without a fate were in flight at the end: the admission of the last group before the first of them."""
    ids = np.sort(ledger["group_id"].to_numpy())
    known = int(np.argmax(ids != np.arange(ids.size))) if ids[-1] != ids.size - 1 else ids.size
    admitted = ledger.sort_by("group_id")["admitted_t"][: max(known, 1)]
    return float(pc.max(admitted).as_py() or 0.0)


class _Halts:
    """The refreshes of one engine."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._ends = np.array([record["t"] for record in records])
        self._pauses = np.array([record["pause_s"] for record in records])
        self._recomputed = np.array([float(record["tokens_recomputed"]) for record in records])

    def seconds(self, begin: float, end: float) -> float:
        """Paused within this time."""
        inside = np.minimum(self._ends, end) - np.maximum(self._ends - self._pauses, begin)
        return float(np.maximum(inside, 0.0).sum())

    def recomputed(self, begin: float, end: float) -> float:
        """Tokens whose KV cache this time lost."""
        return float(self._recomputed[(self._ends > begin) & (self._ends <= end)].sum())


def _life_rows(lives: Lives, halts: _Halts) -> Array:
    """[rows, 6] (1, steps, tokens, context x steps, prompt tokens, seconds without pauses)."""
    if not lives.begin.size:
        return np.empty((0, 6))
    steps = lives.lengths.max(axis=1)
    tokens, context = _progress(lives, steps)
    rows = []
    for begin, end, own in zip(lives.begin, lives.end, steps, strict=True):
        if end > lives.complete or end <= begin:
            continue
        started = np.searchsorted(lives.begin, [begin - AT_ONCE_S, end])
        computed = lives.prompt_tokens * float(started[1] - started[0]) + halts.recomputed(begin, end)
        mean_context = (context(end) - context(begin)) / (end - begin)
        seconds = end - begin - halts.seconds(begin, end)
        rows.append((1.0, own, tokens(end) - tokens(begin), mean_context * own, computed, seconds))
    return np.array(rows).reshape(-1, 6)


def _progress(lives: Lives, steps: Array) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """(tokens decoded until a moment, integral of the context over time until then), as functions of the moment.

    A group's responses go on at its even pace, steps / life, until each has its length; so both rates are straight
    lines between the moments at which a response starts or ends.
    """
    size = lives.lengths.shape[1]
    begin = np.repeat(lives.begin, size)
    pace = np.repeat(steps / np.maximum(lives.end - lives.begin, 1e-9), size)
    end = begin + lives.lengths.ravel() / pace
    moments = np.concatenate([begin, end])
    order = np.argsort(moments)
    moments = moments[order]

    def summed(values: Array) -> Array:
        """Of the active responses, from each moment on."""
        return np.cumsum(np.concatenate([values, -values])[order])

    rate, base = summed(pace), summed(lives.prompt_tokens - pace * begin)
    lasting = np.diff(moments)
    tokens = np.concatenate([[0.0], np.cumsum(rate[:-1] * lasting)])
    middle = (moments[1:] + moments[:-1]) / 2
    context = np.concatenate([[0.0], np.cumsum((base[:-1] + rate[:-1] * middle) * lasting)])
    return (
        lambda moment: float(np.interp(moment, moments, tokens)),
        lambda moment: float(np.interp(moment, moments, context)),
    )


def _are_windows_good(lives: Sequence[Lives], observed: Sequence[Record], slots: int) -> bool:
    """Whether the active responses of a window are known well."""
    active = np.array([min(count, slots) for record in observed for count in record["active"] if count])
    if active.size and active.mean() > FULL * slots:
        return True
    period: float = (observed[-1]["t"] - observed[0]["t"]) / (len(observed) - 1)
    mean_life = float(np.concatenate([own.end - own.begin for own in lives]).mean())
    return mean_life > LONG * period


def _window_rows(observed: Sequence[Record], engine: int, lives: Lives, halts: _Halts, slots: int) -> Array:
    """As `_life_rows`, of each window between observations at whose end the engine was at work. If it had nothing to do
    before, the window begins with the first group. Latency plays no part."""
    rows = []
    for first, last in pairwise(observed):
        before, after = (EngineLoad(*(record[name][engine] for name in EngineLoad._fields)) for record in (first, last))
        begin, end, tokens = first["t"], last["t"], after.tokens - before.tokens
        prompts = after.prompts - before.prompts
        if not before.active:
            started = lives.begin[np.searchsorted(lives.begin, begin) :][:1]
            begin, before = (float(started[0]) if started.size else end), after
        if not after.active or tokens < 0 or end <= begin:
            continue
        steps = tokens / ((min(before.active, slots) + min(after.active, slots)) / 2)
        context = (before.context + after.context) / 2
        computed = prompts + halts.recomputed(begin, end)
        rows.append([0.0, steps, tokens, context * steps, computed, end - begin - halts.seconds(begin, end)])
    return np.array(rows).reshape(-1, 6)


def _put_together(rows: Array) -> Array:
    """Sums of neighbouring windows. No sum ends between the cause of a standstill and the standstill."""
    if not len(rows):
        return rows
    together = max(min(TOGETHER, len(rows) // LEAST_ROWS), len(rows) // MOST_ROWS, 1)
    decoding, starts = rows[:, 2] > 0, [0]
    for place in range(1, len(rows)):
        moving = decoding[place] and decoding[place - 1] and rows[place - 1, 4] < STANDSTILL * rows[:, 4].max()
        if place - starts[-1] >= together and moving:
            starts.append(place)
    return np.asarray(np.add.reduceat(rows, starts, axis=0))
