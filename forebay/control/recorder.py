"""What a run measures, written while it happens: `metrics.jsonl` and `ledger.parquet`; read by report and summary.

metrics.jsonl has one record a line, `kind` first: `step`, `queue`, `refresh`, `event`. Times `t` are seconds since the
recorder started. Step time is `train_wait_s + train_s + publish_s`: each second of the trainer counts once.
ledger.parquet has one row for each group that has its fate; `LEDGER` names the columns.
"""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.control.controller import Batch, Controller, Group, Stage
from forebay.control.ledger import Entry
from forebay.control.types import EngineLoad, Fate, RefreshRecord
from forebay.control.wire import StepReport

ROWS = 512
"""Ledger rows kept in memory before they are written."""

LEDGER = pa.schema(
    [
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("engines", pa.list_(pa.int32())),
        ("attempts", pa.int32()),
        ("admitted_t", pa.float64()),
        ("finished_t", pa.float64()),
        ("scored_t", pa.float64()),
        ("settled_t", pa.float64()),
        ("tokens", pa.int64()),
        ("lengths", pa.list_(pa.int32())),
        ("predicted_length", pa.float64()),
        ("corrected_length", pa.float64()),
        ("rewards", pa.list_(pa.float64())),
        ("reward_mean", pa.float64()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("mean_version", pa.float64()),
        ("trained_version", pa.int64()),
        ("staleness", pa.int64()),
    ]
)
"""Times in seconds since the training began; lengths in tokens, the mean over responses as predicted before the run
(`predicted_length`) and when the group was started (`corrected_length`); versions are policy versions, `mean_version`
weighted by tokens."""


class Recorder:
    """Writes the two files and keeps the few series that the summary needs."""

    def __init__(
        self, folder: Path, on_step: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file: TextIO = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._ledger = pq.ParquetWriter(folder / "ledger.parquet", LEDGER)  # type: ignore[no-untyped-call]
        self._on_step, self._clock, self._start = on_step, clock, clock()
        self._rows: list[dict[str, Any]] = []
        self._admitted: dict[int, float] = {}
        self._finished: dict[int, float] = {}
        self._scored: dict[int, float] = {}
        self.steps: list[dict[str, Any]] = []
        self.staleness: Counter[int] = Counter()
        """Trained groups by staleness in versions: of their oldest token."""
        self.sample_staleness: Counter[int] = Counter()
        """Trained responses by the age of their oldest token."""
        self.token_staleness: Counter[int] = Counter()
        """Trained tokens by age."""
        self.pauses: list[float] = []
        self.examinations: list[dict[str, Any]] = []
        self.verdicts: Counter[str] = Counter()
        """Responses judged so far, by verdict; the reward workers' owner counts."""
        self.tokens = self.tokens_recomputed = 0
        """Response tokens of finished groups; tokens whose KV cache was computed again after a refresh."""

    def close(self) -> None:
        self._flush()
        self._ledger.close()  # type: ignore[no-untyped-call]
        self._file.close()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def dispatched(self, group: Group) -> None:
        self._admitted.setdefault(group.group_id, self.elapsed)

    def generated(self, group: Group) -> None:
        self.tokens += group.tokens
        self._finished[group.group_id] = self.elapsed

    def scored(self, group: Group) -> None:
        self._scored[group.group_id] = self.elapsed

    def settled(self, entry: Entry) -> None:
        """The ledger's sink: one row."""
        samples = [sample for sample in entry.samples if sample.ids]
        tokens = sum(len(sample.ids) for sample in samples)
        mean = sum(sample.mean_version * len(sample.ids) for sample in samples) / tokens if tokens else None
        if entry.fate is Fate.TRAINED and entry.staleness is not None and entry.trained_version is not None:
            self.staleness[entry.staleness] += 1
            for sample in samples:
                self.sample_staleness[entry.trained_version - sample.oldest_version] += 1
                for span in sample.versions:
                    self.token_staleness[entry.trained_version - span.version] += span.end - span.start
        self._rows.append(
            {
                "group_id": entry.group_id,
                "prompt_id": entry.prompt.prompt_id,
                "fate": entry.fate.value,
                "reason": entry.reason,
                "engines": entry.engines,
                "attempts": entry.attempts,
                "admitted_t": self._admitted.pop(entry.group_id, None),
                "finished_t": self._finished.pop(entry.group_id, None),
                "scored_t": self._scored.pop(entry.group_id, None),
                "settled_t": self.elapsed,
                "tokens": tokens,
                "lengths": [len(sample.ids) for sample in entry.samples],
                "predicted_length": entry.prompt.predicted_length,
                "corrected_length": entry.expected,
                "rewards": entry.rewards,
                "reward_mean": statistics.fmean(entry.rewards) if entry.rewards else None,
                "oldest_version": entry.oldest_version,
                "newest_version": max((span.version for sample in samples for span in sample.versions), default=None),
                "mean_version": mean,
                "trained_version": entry.trained_version,
                "staleness": entry.staleness,
            }
        )
        if len(self._rows) >= ROWS:
            self._flush()

    def step(self, report: StepReport, batch: Batch, controller: Controller) -> None:
        """A step was trained."""
        groups = batch.groups + batch.skipped
        ages = [batch.version - group.oldest_version for group in batch.groups]
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
            "reward_mean": statistics.fmean(reward for group in groups for reward in group.rewards),
            "response_length_mean": statistics.fmean(len(sample.ids) for group in groups for sample in group.samples),
            "length_error": _length_error(groups, lambda group: group.prompt.predicted_length),
            "length_error_corrected": _length_error(groups, lambda group: group.expected),
            "staleness_mean": statistics.fmean(ages) if ages else None,
            "staleness_max": max(ages, default=None),
            "queue_groups": controller.count(Stage.QUEUED),
            "in_flight_groups": controller.count(Stage.GENERATING),
            "credits_batches": controller.credits.batches,
            "trained_groups": len(batch.groups),
            "filtered_groups": len(batch.skipped),
            "tokens_generated": self.tokens,
            "verdicts": dict(self.verdicts),
        }
        self.steps.append(record)
        self._write("step", record, flush=True)
        self._on_step(record)

    def queue(self, controller: Controller, loads: Sequence[EngineLoad]) -> None:
        """Lists are over engines, in order; see `EngineLoad` for their fields."""
        record = {"queued": controller.count(Stage.QUEUED), "in_flight": controller.count(Stage.GENERATING)}
        series = {name: [load[place] for load in loads] for place, name in enumerate(EngineLoad._fields)}
        self._write("queue", record | {"version": controller.published} | series)

    def refreshed(self, engine: int, record: RefreshRecord, seconds: float) -> None:
        """`seconds`: from when the engine was told to when it served the new version."""
        self.pauses.append(record.pause_s)
        self.tokens_recomputed += record.tokens_recomputed
        values = {"engine": engine, "version": record.version, "seconds": seconds, "pause_s": record.pause_s}
        values |= {"tokens_recomputed": record.tokens_recomputed, "tokens_discarded": record.tokens_discarded}
        self._write("refresh", values)

    def examined(self, result: dict[str, Any]) -> None:
        """Held-out prompts were answered by a version, or were not."""
        self.examinations.append(result)
        self._write("examination", result, flush=True)

    def event(self, name: str, **values: Any) -> None:
        self._write("event", {"name": name, **values}, flush=True)

    def _flush(self) -> None:
        if self._rows:
            self._ledger.write_table(pa.Table.from_pylist(self._rows, schema=LEDGER))  # type: ignore[no-untyped-call]
            self._rows = []

    def _write(self, kind: str, record: dict[str, Any], flush: bool = False) -> None:
        line = {"kind": kind, "t": round(self.elapsed, 4)} | record
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if flush:
            self._file.flush()


def _length_error(groups: Sequence[Group], predicted: Callable[[Group], float | None]) -> float:
    """Mean absolute error of the predicted mean lengths, in tokens."""
    return statistics.fmean(
        abs((predicted(group) or 0.0) - statistics.fmean(len(sample.ids) for sample in group.samples))
        for group in groups
    )


@dataclass(frozen=True)
class Ages:
    """A distribution of ages in versions."""

    mean: float
    p95: int
    max: int
    histogram: dict[int, int]

    @classmethod
    def of(cls, counts: Counter[int]) -> "Ages":
        """All zero if nothing was counted."""
        total = counts.total()
        mean = sum(age * count for age, count in counts.items()) / total if total else 0.0
        return cls(mean, _quantile(counts, 0.95), max(counts, default=0), dict(sorted(counts.items())))


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least this share of the counted ones does not exceed; 0 for none."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return 0
