"""What a schedule is made from: `lengths/predictions.parquet`, one row for each training prompt, read by columns."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.errors import UserError


@dataclass(frozen=True)
class Predictions:
    """Checked: ids are distinct, lengths finite and positive."""

    prompt_ids: pa.StringArray
    """[P]"""
    predicted: NDArray[np.float64]
    """[P] mean response length in tokens."""
    prompt_tokens: NDArray[np.float64] | None
    """[P]; None if they were not asked for."""
    sha256: str
    """Of the file."""


def read_predictions(path: Path, with_prompt_tokens: bool) -> Predictions:
    """Raises `UserError`, one line, for a file that no schedule can be made from."""
    more = ("prompt_tokens",) if with_prompt_tokens else ()
    table = read_columns(path, ("prompt_id", "predicted", *more))
    if not table.num_rows:
        raise UserError(f"{path}: no prompts to schedule; the training split is empty")
    ids = table["prompt_id"].combine_chunks()
    predicted = _numbers(path, table, "predicted")
    tokens = _numbers(path, table, "prompt_tokens") if with_prompt_tokens else None
    _check_distinct(path, ids)
    _check_positive(path, ids, "predicted length", predicted)
    if tokens is not None:
        _check_positive(path, ids, "number of prompt tokens", tokens)
    return Predictions(ids, predicted, tokens, digest(path))


def read_columns(path: Path, needed: tuple[str, ...]) -> pa.Table:
    """The table of a Parquet file that has these columns. Raises `UserError`."""
    try:
        table = pq.read_table(path)  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file: run the stage that writes it first") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())[:150]}") from None
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise UserError(f"{path}: has no column {missing[0]}; it has {', '.join(table.column_names) or 'none'}")
    return table


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _numbers(path: Path, table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as float64; nulls become NaN."""
    try:
        return np.asarray(table[name].cast(pa.float64()).to_numpy(), dtype=np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(f"{path}: column {name} has type {table[name].type}: numbers are needed") from None


def _check_distinct(path: Path, ids: pa.StringArray) -> None:
    if ids.null_count:
        raise UserError(f"{path}: row {pc.index(pc.is_null(ids), True)} has no prompt_id")
    if pc.count_distinct(ids).as_py() != len(ids):
        counts = pc.value_counts(ids)
        twice = counts.filter(pc.greater(counts.field("counts"), 1))[0]
        raise UserError(f"{path}: prompt {twice['values']} is there {twice['counts']} times: ids must be distinct")


def _check_positive(path: Path, ids: pa.StringArray, what: str, values: NDArray[np.float64]) -> None:
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if bad.size:
        more = f" (and {bad.size - 1:,} others like it)" if bad.size > 1 else ""
        raise UserError(
            f"{path}: prompt {ids[int(bad[0])]} has the {what} {values[bad[0]]:g}{more}: each must be finite and "
            "more than 0"
        )
