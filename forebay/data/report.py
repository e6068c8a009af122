"""What `forebay data prepare` prints."""

import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from forebay.data.counted import counted
from forebay.data.prepare import PreparedData
from forebay.run import RunContext

_REASONS = 8


def lines(run: RunContext, done: PreparedData) -> list[tuple[str, str]]:
    """(name, value) lines."""
    counts = done.counts
    kept = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "validation", "test", "unused"))
    told = [
        ("read", counted(counts["read"], "row")),
        ("kept", kept),
        ("left out", _left_out(counts)),
    ]
    told += [("too few" if not place else "", text) for place, text in enumerate(done.warnings)]
    quarantine = run.data / "quarantine.parquet"
    told += [("reasons" if not place else "", text) for place, text in enumerate(_reasons(quarantine))]
    for version in done.versions:
        here = "found read" if version.cached else "read now"
        parents = f", goes on from {', '.join(version.parents)}" if version.parents else ""
        told.append(("version", f"{version.folder.name}{parents}, {here}: {version.folder}"))
    return [*told, ("quarantine", str(quarantine)), ("rows", str(done.train.parent)), ("start model", str(done.model))]


def _left_out(counts: dict[str, int]) -> str:
    repeated = counted(counts["duplicates"], "duplicate")
    return f"{counts['quarantined']:,} quarantined, {repeated}, {counts['leaked']:,} leaked"


def _reasons(path: Path) -> list[str]:
    """The most frequent ones, numbers aside."""
    tally: Counter[str] = Counter()
    for batch in pq.ParquetFile(path).iter_batches(columns=["reason"]):
        tally.update(re.sub(r"\b[0-9a-f]*\d[0-9a-f]*\b", "N", reason) for reason in batch.column(0).to_pylist())
    return [f"{counted(count, 'row')}: {reason}" for reason, count in tally.most_common(_REASONS)]
