"""One virtual engine: continuous batching under a virtual clock that counts decode steps.

All active responses advance together, so one count of steps serves them all: a response that is admitted at step V with
r tokens left ends at V + r. Between two events the number N of active responses is constant and the KV cache grows by N
tokens a step, so n steps from a cache of K tokens take exactly
    sum over i < n of a + b N + c (K + N i) = n (a + b N + c K) + c N n (n - 1) / 2     seconds,
which is also inverted in closed form. No loop runs over tokens.

Invariants:
- Everything takes effect between two decode steps, in this order: responses end, the KV cache overflows, new weights
  come, responses are admitted.
- `time` is the end of the last step that is accounted for, and of the prefills and pauses after it; it is ahead of the
  world's clock by no more than those. `due` is when `fire` has to be called next.
- First in, first out: a response waits until those before it have a slot and KV room; a preempted one goes to the
  front.
- Each token belongs to the version that served when it was decoded.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.control.types import EngineLoad, RefreshMode, Sample
from forebay.simulation.model import EngineModel
from forebay.simulation.responses import TURNS, Change, Job, Response, Swap

PLACES = 16
"""Bits of an end that say which response of its group it is; those above are the step."""
PLACE = (1 << PLACES) - 1


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine has done so far. Seconds and tokens."""

    filled: float
    """Slots x seconds with a response in them, also while the engine stands still; padding counts as filled."""
    idle: float
    """Without any response."""
    paused: float
    """Standing still for new weights, recomputation included."""
    preempted: int
    """KV tokens given up since the cache was full."""
    recomputed: int
    """Prompt and response tokens computed again, after a refresh or a preemption."""


@dataclass(slots=True, eq=False)
class Engine:
    """See the module's text. Slots, since many engines take turns in the processor's cache."""

    model: EngineModel
    time: float = 0.0
    due: float = math.inf
    swap: Swap | None = None
    """The refresh that the last `fire` has carried out."""
    _clock: int = 0  # decode steps
    _active: int = 0
    _resident: int = 0  # KV tokens of the active responses
    _ahead: int = 0  # steps from `time` to `due`
    _moment: int = 0  # of the next admission: the step, and the admissions before it in this step
    # The next to end is the last, of several the one that came first: a bisection puts one in, none takes it out.
    _running: list[Job] = field(default_factory=list)  # for each response
    _ends: "array[int]" = field(default_factory=lambda: array("q"))  # of these, the step and the place, negative
    _waiting: deque[Response] = field(default_factory=deque)
    _refresh: tuple[RefreshMode, int] | None = None
    _history: list[Change] = field(default_factory=lambda: [Change(0, 0, False)])
    _decoded: int = 0  # tokens, as the next two
    _padding: int = 0
    _prompts: int = 0
    _filled: float = 0.0
    _idle: float = 0.0
    _paused: float = 0.0
    _paused_until: float = 0.0
    _preempted: int = 0
    _recomputed: int = 0
    _padded: bool = field(init=False)
    _bounded: bool = field(init=False)

    def __post_init__(self) -> None:
        self._padded = self.model.padded
        self._bounded = self.model.kv_tokens != math.inf and not self._padded

    # ---- what the owner does

    def submit(self, now: float, responses: Sequence[Response]) -> None:
        """New responses, in order, of whole groups; they are looked at at the next boundary."""
        self._waiting.extend(responses)
        self._stop(now)

    def refresh(self, now: float, mode: RefreshMode, version: int) -> None:
        """Take new weights at the next boundary, with `drain` at the next one without a response."""
        self._refresh = (mode, version)
        self._stop(now)

    def drop(self, now: float, job: Job) -> None:
        """Nobody waits for this group any more: its responses leave at the next boundary."""
        self._stop(now)
        for index in reversed([index for index, other in enumerate(self._running) if other is job]):
            self._take_out(index)
        self._waiting = deque(response for response in self._waiting if response[0] is not job)

    def samples(self, job: Job) -> tuple[Sample, ...]:
        """Of a group all of whose responses have ended."""
        return job.samples(self._history)

    def fire(self) -> list[Response]:
        """Do what is due; returns the responses that have ended, `swap` says whether new weights came."""
        self._decode(self._ahead, self.due)
        finished = self._finish()
        if self._bounded and self._resident + self._active > self.model.kv_tokens:
            self._preempt()
        self.swap = None
        if self._refresh is not None and (self._refresh[0] != "drain" or self.is_empty):
            self.swap = self._take_weights(*self._refresh)
            self._refresh = None
        if self._padded:
            self._admit_padded()
        elif self._waiting:
            self._admit()
        self._plan()
        return finished

    def account(self, now: float) -> Usage:
        """What it has done until `now`; the seconds that it is ahead are taken off."""
        self._reach(now)
        return Usage(
            filled=self._filled - self._active * max(self.time - now, 0.0),
            idle=self._idle,
            paused=self._paused - max(self._paused_until - now, 0.0),
            preempted=self._preempted,
            recomputed=self._recomputed,
        )

    # ---- what is known

    @property
    def is_empty(self) -> bool:
        return not self._active and not self._waiting

    def load(self) -> EngineLoad:
        """As a client with no delay would see it."""
        running = self._responses()
        held = [*running, *self._waiting]
        padding = sum(self._clock - job.start(place) - self._advance(job, place) for job, place in running)
        advanced = sum(self._advance(job, place) for job, place in running)
        return EngineLoad(
            active=len(held),
            context=sum(job.prompt_tokens + job.done(place) for job, place in held) + advanced,
            tokens=self._decoded - self._padding - padding,
            prompts=self._prompts,
        )

    # ---- time

    def _reach(self, now: float) -> None:
        """Go on to the first boundary at or after `now`; it is not beyond `due`."""
        seconds = now - self.time
        if seconds <= 0:
            return
        if not self._active:
            self._decode(0, now)
            return
        model, growth = self.model, self.model.c * self._active / 2
        pace = model.a + model.b * self._active + model.c * self._resident - growth
        steps = 2 * seconds / (pace + math.sqrt(pace * pace + 4 * growth * seconds))
        # A boundary that is `now` but for rounding is now.
        whole = min(math.ceil(steps - 1e-9 * (1 + steps)), self._ahead)
        self._ahead -= whole
        self._decode(whole, self.time + self._seconds(whole))

    def _seconds(self, steps: int) -> float:
        """For so many steps from here, as long as nothing happens."""
        active, model = self._active, self.model
        return steps * (model.a + model.b * active + model.c * (self._resident + active * (steps - 1) / 2))

    def _decode(self, steps: int, until: float) -> None:
        """So many steps until then; without a response, just wait."""
        seconds, self.time, active = until - self.time, until, self._active
        if not active:
            self._idle += seconds
            return
        self._filled += active * seconds
        grown = steps * active
        if steps:
            self._clock += steps
            self._moment = self._clock << TURNS
        self._resident += grown
        self._decoded += grown

    def _stand(self, seconds: float) -> None:
        """Nothing is decoded."""
        self.time += seconds
        self._filled += self._active * seconds

    def _stop(self, now: float) -> None:
        """The next thing happens at the first boundary at or after `now`."""
        self._reach(now)
        self._ahead, self.due = 0, self.time

    def _plan(self) -> None:
        """What happens next by itself: a response ends, or the KV cache is full."""
        if not self._ends:
            self._ahead, self.due = 0, math.inf
            return
        ahead = (-self._ends[-1] >> PLACES) - self._clock
        if self._bounded:
            ahead = min(ahead, int(self.model.kv_tokens - self._resident) // self._active)
        self._ahead, self.due = ahead, self.time + self._seconds(ahead)

    # ---- responses come and go

    def _admit(self) -> None:
        """From the front, as many as find a slot and KV room."""
        waiting, slots = self._waiting, self.model.slots
        while waiting and self._active < slots:
            job, place = waiting[0]
            done = len(job.prefixes[place].ids)
            if self._bounded and self._active:
                # Its tokens, and one more of each active response.
                growth = job.prompt_tokens + done + self._active + 1
                if self._resident + growth > self.model.kv_tokens:
                    break
            waiting.popleft()
            self._start(job, place, done, self._clock + job.wholes[place].stop - done)

    def _admit_padded(self) -> None:
        """A static batch, once the one before is done; its whole rectangle has to fit the KV cache."""
        if self._active:
            return
        chosen: list[Response] = []
        contexts = rest = 0
        while self._waiting and len(chosen) < self.model.slots:
            job, place = self._waiting[0]
            done = job.done(place)
            longest = max(rest, job.wholes[place].stop - done)
            wider = contexts + job.prompt_tokens + done
            if chosen and wider + (len(chosen) + 1) * longest > self.model.kv_tokens:
                break
            contexts, rest = wider, longest
            chosen.append(self._waiting.popleft())
        end = self._clock + rest
        for job, place in chosen:
            self._start(job, place, job.done(place), end)

    def _start(self, job: Job, place: int, done: int, end: int) -> None:
        job.moments[place] = self._moment
        self._moment += 1
        index = bisect_left(self._ends, 1 - (end + 1 << PLACES))  # before all of this step
        self._ends.insert(index, -((end << PLACES) + place))
        self._running.insert(index, job)
        self._active += 1
        self._resident += job.prompt_tokens + done
        if done or not job.prefilled:
            self._compute(job, done)

    def _compute(self, job: Job, done: int) -> None:
        """The KV cache of its tokens so far, and of the prompt, unless another response of its group has done that."""
        computed = job.prompt_tokens + done
        if done:
            self._recomputed += computed
        else:
            self._prompts += computed
        job.prefilled = True
        self._stand(self.model.prefill_s * computed)

    def _finish(self) -> list[Response]:
        """Take out those whose step has come."""
        finished: list[Response] = []
        ends, running, last = self._ends, self._running, 1 - (self._clock + 1 << PLACES)
        while ends and ends[-1] >= last:
            job, place = running.pop(), -ends.pop() & PLACE
            if self._padded:
                self._leave(job, place)
            else:
                self._active -= 1
                self._resident -= job.prompt_tokens + job.wholes[place].stop
            finished.append((job, place))
        return finished

    def _responses(self) -> list[Response]:
        """Those that are running."""
        return [(job, -end & PLACE) for job, end in zip(self._running, self._ends, strict=True)]

    def _take_out(self, index: int) -> Response:
        """Before its end."""
        job, place = self._running.pop(index), -self._ends.pop(index) & PLACE
        self._leave(job, place)
        return job, place

    def _leave(self, job: Job, place: int) -> None:
        """Give slot and KV cache up."""
        steps = self._clock - job.start(place)
        self._active -= 1
        self._resident -= job.prompt_tokens + job.done(place) + steps
        if self._padded:
            self._padding += steps - self._advance(job, place)

    def _preempt(self) -> None:
        """The youngest give their KV cache up until the others can go on."""
        while self._active > 1 and self._resident + self._active > self.model.kv_tokens:
            moments = [job.moments[place] for job, place in self._responses()]
            job, place = self._take_out(moments.index(max(moments)))
            job.interrupt(place, self._advance(job, place), self._history)
            self._preempted += job.prompt_tokens + job.done(place)
            self._waiting.appendleft((job, place))

    def _advance(self, job: Job, place: int) -> int:
        """Tokens of a running response since its admission; a padded one gets no more than its length."""
        return min(self._clock - job.start(place), job.wholes[place].stop - job.done(place))

    # ---- versions

    def _take_weights(self, mode: RefreshMode, version: int) -> Swap:
        began, recomputed = self.time, 0
        aborted = self._abort() if mode == "abort" else []
        discarded = sum(len(sample.ids) for _, samples in aborted for sample in samples)
        self._history.append(Change(self._moment, version, mode == "in_place"))
        self._stand(self.model.pause_s)
        answered = self.time
        if mode == "retract":
            recomputed = self._resident
            self._recomputed += recomputed
            self._stand(self.model.prefill_s * recomputed)
        self._paused += self.time - began
        self._paused_until = self.time
        return Swap(version, began, answered, recomputed, aborted, discarded)

    def _abort(self) -> list[tuple[Job, tuple[Sample, ...]]]:
        """The groups that are here, with what there is of them; the engine is empty then."""
        running = sorted(self._responses(), key=lambda response: response[0].moments[response[1]])
        held: dict[Job, list[int]] = {}
        for job, place in [*running, *self._waiting]:
            held.setdefault(job, []).append(place)
        for job, place in running:
            advance = self._advance(job, place)
            self._padding += self._clock - job.start(place) - advance
            job.interrupt(place, advance, self._history)
        self._running, self._ends = [], array("q")
        self._waiting.clear()
        self._active = self._resident = 0
        return [(job, job.samples(self._history, places)) for job, places in held.items()]
