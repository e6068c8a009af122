"""Reads `metrics.jsonl`, the record of a run that may still be going on or have been killed in the middle of a line.

Invariants: a line that is not whole is left out, never guessed; a file that is not there is a run without records.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """The records by kind, each list in the order of writing. Times `t` are seconds since training began."""

    steps: list[Record] = field(default_factory=list)
    """One for each optimizer step."""
    queue: list[Record] = field(default_factory=list)
    """Several each second: groups queued and in flight."""
    refreshes: list[Record] = field(default_factory=list)
    """One for each engine's weight refresh."""


def read_metrics(path: Path) -> Metrics:
    """All whole records of a metrics file."""
    metrics = Metrics()
    kinds = {"step": metrics.steps, "queue": metrics.queue, "refresh": metrics.refreshes}
    if not path.exists():
        return metrics
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off: the writer was killed, or is still writing
            if isinstance(record, dict) and record.get("kind") in kinds:
                kinds[record["kind"]].append(record)
    return metrics


def series(records: list[Record], x: str, y: str) -> tuple[list[float], list[float]]:
    """The points of `y` over `x`, of the records that have numbers for both."""
    points = [(r[x], r[y]) for r in records if _is_number(r.get(x)) and _is_number(r.get(y))]
    return [point[0] for point in points], [point[1] for point in points]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is not itself
