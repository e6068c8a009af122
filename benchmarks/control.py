"""What one Control Unit can carry: the `Controller` itself, driven by virtual engines, scorers and a trainer.

    python -m benchmarks.control [--engines 256] [--steps 120]

Nothing is generated or trained: a heap of events in virtual time plays 256 engines with 40 responses each, and every
event (each response's end is one) is followed by the same questions that the asyncio shell asks (dispatch until none is
left, refresh, batch while the trainer waits). The ledger is written to Parquet as in a run. Responses are fresh tuples
of 20 to 160 tokens, so that what the controller keeps shows in memory.

`groups_per_s` is groups that got their fate over wall time, this driver's own time included (`groups_per_cpu_s`: over
processor time, for a machine that others use too); `us_per_event` the same wall time over events (admissions, ends of
responses and groups, scores, batches, steps, snapshots, refreshes). Both, like the concurrency (the least seen at the
end of a step), leave out the filling and draining of the pipeline. `rss_growth_mb` compares the peaks of the first and
the last steps between those, since the batches kept for a trainer's restart come and go.
"""

import argparse
import contextlib
import heapq
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import report
from forebay.control.controller import Controller, Dispatch, Group, Rules
from forebay.control.recorder import Recorder
from forebay.control.source import Minibatch, scheduled
from forebay.control.types import Prompt, Sample, VersionSpan
from forebay.errors import RunError

GROUP_SIZE = 8
BATCHES_AHEAD = 6
"""Work in progress and staleness bound: enough that the engines' slots, not the rules, limit generation."""
TOKEN_S = 0.01
"""Virtual seconds for one token of every response of an engine."""
REWARD_S, REFRESH_S = 0.002, 0.001
TRAIN_S = 0.2
"""Virtual; less than the engines need for a batch, so that the trainer waits and asks at every event."""
CHECKPOINT_EVERY = 10
"""Steps; the controller keeps the batches of the steps since."""
WARM_UP_STEPS = BATCHES_AHEAD + CHECKPOINT_EVERY
"""Until everything that the controller keeps is there."""
LENGTHS = (20, 160)
POOL = tuple(range(1000, 1000 + LENGTHS[1]))
LOGPROBS = tuple(-1.0 / token for token in POOL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--samples", type=int, default=40, help="responses in flight on one engine")
    parser.add_argument("--batch-groups", type=int, default=512)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    if args.steps < WARM_UP_STEPS + BATCHES_AHEAD + 2 * CHECKPOINT_EVERY:
        parser.error("--steps must be 42 or more: the first 16 and the last 6 are not measured")
    rules = Rules(
        steps=args.steps,
        batch_groups=args.batch_groups,
        group_size=GROUP_SIZE,
        sync_every=1,
        max_staleness=BATCHES_AHEAD,
        work_in_progress=BATCHES_AHEAD,
        max_concurrent_samples=args.samples,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Recorder(Path(folder), _ignore)) as recorder:
        drive = Drive(rules, args.engines, recorder)
        drive.run()
    rows, result = outcome(drive)
    report("control", f"{args.engines} virtual engines, {args.steps} steps of {args.batch_groups} groups", rows, result)


@dataclass(frozen=True)
class Mark:
    """State of the measurement at the end of a step."""

    wall_s: float
    cpu_s: float
    events: int
    groups: int
    rss_mb: float
    in_flight: int


@dataclass
class Drive:
    """Virtual engines, scorer and trainer around one controller."""

    rules: Rules
    engines: int
    recorder: Recorder
    controller: Controller = field(init=False)
    now: float = 0.0
    events: int = 0
    in_flight: int = 0
    """Responses that engines are generating."""
    marks: list[Mark] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.controller = Controller(self.rules, prompts(), self.recorder.settled)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._rng = random.Random(0)
        self._versions = [0] * self.engines
        self._trainer_waits = True

    def run(self) -> None:
        """Until the last step; raises `LedgerError` if the account does not add up."""
        for engine in range(self.engines):
            self._ask("engine_joined", engine, 0)
        self._mark()
        self._pump()
        while not self.controller.finished:
            if not self._heap:
                raise RunError(
                    f"control benchmark: nothing is left to happen after step {self.controller.steps_trained}"
                )
            self.now, _, happen, arguments = heapq.heappop(self._heap)
            happen(*arguments)
            self._pump()

    # ---- what the shell does after every event

    def _pump(self) -> None:
        if self._trainer_waits:
            batch = self._ask("next_batch", self.controller.steps_trained + 1)
            if batch is not None:
                self._trainer_waits = False
                self.events += 1
                self._later(TRAIN_S, self._trained, batch.step)
        while (dispatch := self._ask("next_dispatch")) is not None:
            self._start(dispatch)
        engine = self._ask("next_refresh")
        if engine is not None:
            self._ask("refresh_started", engine)
            self.events += 1
            self._later(REFRESH_S, self._refreshed, engine, self.controller.published)

    def _start(self, dispatch: Dispatch) -> None:
        for group in dispatch.groups:
            self.recorder.dispatched(group)
            self.events += 1
            self.in_flight += GROUP_SIZE
            lengths = [self._rng.randint(*LENGTHS) for _ in range(GROUP_SIZE)]
            started = self._versions[dispatch.engine]
            for length in sorted(lengths)[:-1]:
                self._later(length * TOKEN_S, self._response, group, group.attempts, length)
            self._later(max(lengths) * TOKEN_S, self._generated, group, dispatch.engine, started, lengths)

    # ---- what happens

    def _response(self, group: Group, attempt: int, length: int) -> None:
        self.events += 1
        self.in_flight -= 1
        self._ask("sample_finished", group.group_id, attempt, length)

    def _generated(self, group: Group, engine: int, started: int, lengths: list[int]) -> None:
        self.events += 1
        self.in_flight -= 1
        newest = self._versions[engine]
        samples = tuple(Sample(POOL[:n], LOGPROBS[:n], spans(started, newest, n), "stop") for n in lengths)
        self._ask("generated", group.group_id, group.attempts, samples)
        self.recorder.generated(group)
        self._later(REWARD_S, self._scored, group.group_id)

    def _scored(self, group_id: int) -> None:
        self.events += 1
        spread = 0.0 if self._rng.random() < 0.1 else 1.0
        self._ask("scored", group_id, (spread,) + (0.0,) * (GROUP_SIZE - 1))

    def _trained(self, step: int) -> None:
        self.events += 2
        self._ask("step_trained", step)
        self._ask("snapshot_published", step)
        if step % CHECKPOINT_EVERY == 0:
            self._ask("checkpointed", step)
        self._trainer_waits = not self.controller.finished
        self._mark()

    def _refreshed(self, engine: int, version: int) -> None:
        self.events += 1
        self._versions[engine] = version
        self._ask("refresh_done", engine, version)

    # ---- plumbing

    def _later(self, delay: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, happen, arguments))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the controller and count what it costs."""
        method = getattr(self.controller, name)
        start = time.process_time()
        answer = method(*arguments)
        self.seconds[name] += time.process_time() - start
        self.calls[name] += 1
        return answer

    def _mark(self) -> None:
        fates = self.controller.ledger.fates()
        settled = fates["admitted"] - fates["in_flight"]
        self.marks.append(
            Mark(time.perf_counter(), time.process_time(), self.events, settled, rss_mb(), self.in_flight)
        )


def spans(started: int, newest: int, tokens: int) -> tuple[VersionSpan, ...]:
    """The versions of a response that may have gone on over one refresh."""
    if newest == started:
        return (VersionSpan(started, 0, tokens),)
    middle = tokens // 2
    return VersionSpan(started, 0, middle), VersionSpan(newest, middle, tokens)


def prompts() -> Iterator[Minibatch]:
    """4,096 prompts in minibatches of four, epoch after epoch."""
    rng = random.Random(1)
    rows = [Prompt(f"{i:016x}", tuple(range(32)), "text", "null", rng.uniform(*LENGTHS)) for i in range(4096)]
    minibatches = [tuple(rows[i : i + 4]) for i in range(0, len(rows), 4)]
    return scheduled([minibatches[i : i + 4] for i in range(0, len(minibatches), 4)], 0)


def outcome(drive: Drive) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The controller's methods by what they cost, and the numbers of the steady part."""
    rows = [
        {"call": name, "calls": drive.calls[name], "cpu_s": total, "us_per_call": 1e6 * total / drive.calls[name]}
        for name, total in sorted(drive.seconds.items(), key=lambda item: -item[1])
    ]
    steady = drive.marks[WARM_UP_STEPS:-BATCHES_AHEAD]
    first, last = steady[0], steady[-1]
    peaks = [max(mark.rss_mb for mark in part) for part in (steady[:CHECKPOINT_EVERY], steady[-CHECKPOINT_EVERY:])]
    wall = last.wall_s - first.wall_s
    whole = drive.marks[-1].cpu_s - drive.marks[0].cpu_s
    return rows, {
        "groups_per_s": (last.groups - first.groups) / wall,
        "us_per_event": 1e6 * wall / (last.events - first.events),
        "concurrent_samples": min(mark.in_flight for mark in steady),
        "rss_growth_mb": peaks[1] - peaks[0],
        "rss_mb": last.rss_mb,
        "groups_per_cpu_s": (last.groups - first.groups) / (last.cpu_s - first.cpu_s),
        "groups": last.groups - first.groups,
        "engines": drive.engines,
        "group_size": GROUP_SIZE,
        "controller_share": sum(drive.seconds.values()) / whole,
    }


def _ignore(record: dict[str, Any]) -> None:
    pass


def rss_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
