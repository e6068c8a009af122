"""Reads `ledger.parquet`, the account of a run's groups, wherever the run lies: a folder here, or the store.

Invariants:
- Every admitted group has one row at most (its fate); group ids count admissions, so ids without a row were in flight
  when the run ended. A file that says otherwise is refused, not summed up.
- Nothing here is measured: what is shown is what the Control Unit wrote.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.config import StorageConfig
from forebay.control.ledger import LedgerError
from forebay.control.recorder import LEDGER
from forebay.control.types import Fate
from forebay.errors import UserError
from forebay.storage.store import Store

FILE = "ledger.parquet"

COLUMNS = tuple(LEDGER.names)

REASONS_SHOWN = 8


@dataclass(frozen=True)
class FateSum:
    """The groups of one fate."""

    fate: str
    groups: int
    tokens: int
    reward_mean: float | None


@dataclass(frozen=True)
class Account:
    """A run's groups, summed up."""

    admitted: int
    fates: list[FateSum]
    """Each fate, also those without a group."""
    in_flight: int
    """Admitted, but without a fate: the run ended first."""
    reasons: list[tuple[str, str, int]]
    """(fate, reason, groups), the most frequent first."""
    staleness: list[tuple[int, int]]
    """(versions, trained groups)."""
    attempts: list[tuple[int, int]]
    """(attempts, groups)."""
    engines: list[tuple[int, int]]
    """(engine, attempts it worked on)."""
    generating_s: float | None
    """Median time from admission to the last response."""
    queued_s: float | None
    """Median time of trained groups from there to the end of their step."""


@contextmanager
def located(run: str, storage: StorageConfig) -> Iterator[Path]:
    """The ledger of a run: `run` is its folder, the file, or the id of a run under `storage.scratch` or `storage.uri`.

    Raises `UserError` if there is none.
    """
    given = Path(run)
    for folder in (given, Path(storage.scratch) / "runs" / run):
        if folder.is_dir():
            if not (folder / FILE).is_file():
                raise UserError(f"{folder}: has no {FILE}: not a run's folder, or no group of it got its fate")
            yield folder / FILE
            return
    if given.is_file():
        yield given
        return
    store = Store(storage.uri, storage.endpoint_url)
    if given.name != run or store.read_json(f"{run}/MANIFEST.json") is None:
        raise UserError(
            f"{run}: no such folder, no such run under {Path(storage.scratch) / 'runs'}, and none published in "
            f"{storage.uri}: name a run's folder, or its id and the profile that says where it is "
            "stored (ledger: --profile PROFILE)"
        )
    with TemporaryDirectory() as temporary:
        yield store.fetch_file(run, FILE, Path(temporary))


def read_ledger(path: Path) -> pa.Table:
    """The rows, by group id. Raises `UserError` for a damaged file or another kind, `LedgerError` if they do not
    add up."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as Parquet, so it is damaged or not a ledger: name another copy of the run, "
            f"such as the published one ({' '.join(str(error).split())[:150]})"
        ) from None
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise UserError(f"{path}: is not a ledger, or one of another version: it has no column {missing[0]}")
    unknown = set(pc.unique(table["fate"]).to_pylist()) - {fate.value for fate in Fate}
    if unknown:
        raise LedgerError(f"{path}: groups with the fate {sorted(map(str, unknown))[0]!r}, which there is not")
    table = table.sort_by("group_id")
    if pc.count_distinct(table["group_id"]).as_py() != table.num_rows:
        raise LedgerError(f"{path}: some groups have two fates: the account does not add up")
    return table


def account(table: pa.Table) -> Account:
    """Sum up a ledger."""
    rows = {row["fate"]: row for row in _grouped(table, ["fate"])}
    fates = [
        FateSum(
            fate.value,
            row["group_id_count"] if (row := rows.get(fate.value)) else 0,
            (row["tokens_sum"] or 0) if row else 0,
            row["reward_mean_mean"] if row else None,
        )
        for fate in Fate
    ]
    trained = table.filter(pc.field("fate") == Fate.TRAINED.value)
    reasons = _grouped(table.filter(pc.field("reason") != ""), ["fate", "reason"])
    admitted = table["group_id"][-1].as_py() + 1 if table.num_rows else 0
    return Account(
        admitted=admitted,
        fates=fates,
        in_flight=admitted - table.num_rows,
        reasons=sorted(
            ((row["fate"], row["reason"], row["group_id_count"]) for row in reasons), key=lambda item: -item[2]
        ),
        staleness=_histogram(trained["staleness"]),
        attempts=_histogram(table["attempts"]),
        engines=_histogram(pc.list_flatten(table["engines"])),
        generating_s=_median(pc.subtract(table["finished_t"], table["admitted_t"])),
        queued_s=_median(pc.subtract(trained["settled_t"], trained["finished_t"])),
    )


def one_group(table: pa.Table, group_id: int) -> dict[str, Any]:
    """The row of a group; raises `UserError` if there is none."""
    rows = table.filter(pc.field("group_id") == group_id).to_pylist()
    if not rows:
        known = f"ids go from 0 to {table['group_id'][-1].as_py()}" if table.num_rows else "it is empty"
        raise UserError(f"group {group_id} has no fate in this ledger ({known}; a group in flight at the end has none)")
    return {name: rows[0][name] for name in COLUMNS}


def account_lines(summed: Account) -> list[tuple[str, str, str, str]]:
    """(fate, groups, response tokens, mean reward) of each fate, then those in flight and the sum."""
    lines = [
        (
            part.fate,
            f"{part.groups:,}",
            f"{part.tokens:,}",
            "-" if part.reward_mean is None else f"{part.reward_mean:.3f}",
        )
        for part in summed.fates
    ]
    tokens = sum(part.tokens for part in summed.fates)
    return [
        *lines,
        ("in flight at the end", f"{summed.in_flight:,}", "-", "-"),
        ("admitted", f"{summed.admitted:,}", f"{tokens:,}", "-"),
    ]


def detail_lines(summed: Account) -> list[tuple[str, str]]:
    """(name, text) of what stands below the account."""
    ages = sum(age * count for age, count in summed.staleness) / max(1, sum(count for _, count in summed.staleness))
    lines = [
        ("staleness of trained groups", f"{_counts(summed.staleness)} (mean {ages:.2f})" if summed.staleness else "-"),
        ("attempts", _counts(summed.attempts) or "-"),
        ("engines", _counts(summed.engines) or "-"),
        ("generating, median", _seconds(summed.generating_s)),
        ("from then to trained, median", _seconds(summed.queued_s)),
    ]
    lines += [(fate, f"{count:,} x {reason}") for fate, reason, count in summed.reasons[:REASONS_SHOWN]]
    if len(summed.reasons) > REASONS_SHOWN:
        rest = sum(count for _, _, count in summed.reasons[REASONS_SHOWN:])
        lines.append(("", f"{rest:,} groups with other reasons"))
    return lines


def group_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of one group's columns."""
    return [(name, _value(value)) for name, value in row.items()]


def _grouped(table: pa.Table, keys: list[str]) -> list[dict[str, Any]]:
    sums = [("group_id", "count"), ("tokens", "sum"), ("reward_mean", "mean")]
    rows: list[dict[str, Any]] = table.group_by(keys).aggregate(sums).to_pylist()
    return rows


def _histogram(values: pa.ChunkedArray) -> list[tuple[int, int]]:
    counted = pc.value_counts(pc.drop_null(values)).to_pylist()
    return sorted((item["values"], item["counts"]) for item in counted)


def _median(values: pa.ChunkedArray) -> float | None:
    median: float | None = pc.quantile(values, 0.5)[0].as_py()
    return median


def _counts(histogram: list[tuple[int, int]]) -> str:
    return ", ".join(f"{value}: {count:,}" for value, count in histogram)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
