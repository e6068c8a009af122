"""What a run measures, written as JSON lines while it happens; read by the report and the summary.

One record a line, `kind` first: `step`, `queue`, `refresh`, `event`. Times `t` are seconds since the recorder started.
Step time is `train_wait_s + train_s + publish_s`: each second of the trainer counts once.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from forebay.control.controller import Batch, Controller, Group, Stage
from forebay.control.types import RefreshRecord, Sample
from forebay.control.wire import StepReport


class Recorder:
    """Writes `metrics.jsonl` and keeps the few series that the summary needs."""

    def __init__(
        self, path: Path, on_step: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ):
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._on_step, self._clock, self._start = on_step, clock, clock()
        self.steps: list[dict[str, Any]] = []
        self.staleness: list[int] = []
        """Of each trained group, in versions."""
        self.pauses: list[float] = []
        self.tokens = 0
        """Response tokens that engines have delivered."""

    def close(self) -> None:
        self._file.close()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def step(self, report: StepReport, batch: Batch, controller: Controller) -> None:
        """A step was trained."""
        groups = batch.groups + batch.skipped
        ages = [batch.version - group.oldest_version for group in batch.groups]
        self.staleness.extend(ages)
        # Ours win over the trainer's of the same name: the trainer sees only the groups that teach.
        metrics = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
        record: dict[str, Any] = metrics | {
            "t": round(self.elapsed, 4),
            "step": report.step,
            "version": batch.version,
            "step_time_s": report.train_wait_s + report.train_s + report.publish_s,
            "train_wait_s": report.train_wait_s,
            "train_s": report.train_s,
            "publish_s": report.publish_s,
            "reward_mean": statistics.fmean(_rewards(groups)),
            "response_length_mean": statistics.fmean(len(sample.ids) for group in groups for sample in group.samples),
            "staleness_mean": statistics.fmean(ages) if ages else None,
            "staleness_max": max(ages, default=None),
            "queue_groups": controller.count(Stage.QUEUED),
            "in_flight_groups": controller.count(Stage.GENERATING),
            "trained_groups": len(batch.groups),
            "filtered_groups": len(batch.skipped),
            "tokens_generated": self.tokens,
        }
        self.steps.append(record)
        self._write("step", record, flush=True)
        self._on_step(record)

    def queue(self, controller: Controller) -> None:
        self._write(
            "queue",
            {
                "queued": controller.count(Stage.QUEUED),
                "in_flight": controller.count(Stage.GENERATING),
                "version": controller.published,
            },
        )

    def refreshed(self, engine: int, record: RefreshRecord) -> None:
        self.pauses.append(record.pause_s)
        self._write("refresh", {"engine": engine, "version": record.version, "pause_s": record.pause_s})

    def generated(self, samples: Sequence[Sample]) -> None:
        self.tokens += sum(len(sample.ids) for sample in samples)

    def event(self, name: str, **values: Any) -> None:
        self._write("event", {"name": name, **values}, flush=True)

    def _write(self, kind: str, record: dict[str, Any], flush: bool = False) -> None:
        line = {"kind": kind, "t": round(self.elapsed, 4)} | record
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if flush:
            self._file.flush()


def _rewards(groups: Sequence[Group]) -> list[float]:
    return [reward for group in groups for reward in group.rewards]
