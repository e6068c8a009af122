"""`history`: a prompt's own lengths in an earlier run, from its `ledger.parquet` or `profile.parquet`.

Invariants: only whole groups count (a group that failed has no lengths to learn from); every length is a number of
tokens, 1 or more, or the file is refused. A response as long as the budget counts as truncated where the file does not
say (a ledger).
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import UserError

Responses = tuple[list[float], list[bool]]
"""Lengths, and whether each was truncated."""

_WHAT_TO_DO = "name the ledger.parquet or profile.parquet of a run, as it was written"


def read_history(path: Path, longest: int) -> dict[str, Responses]:
    """Prompt id -> responses. Raises `UserError`, one line."""
    where = f"lengths.history {path}"
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{where}: there is no such file; {_WHAT_TO_DO}") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{where}: cannot be read as Parquet ({str(error).splitlines()[0]}); {_WHAT_TO_DO}") from None
    if missing := [name for name in ("prompt_id", "lengths") if name not in table.column_names]:
        raise UserError(f"{where}: has no column {missing[0]}; {_WHAT_TO_DO}")
    if not pa.types.is_list(table.schema.field("lengths").type):
        raise UserError(f"{where}: column lengths holds no lists; {_WHAT_TO_DO}")
    if "fate" in table.column_names:
        table = table.filter(pc.not_equal(table["fate"], "failed"))
    return _collect(table, where, longest)


def _collect(table: pa.Table, where: str, longest: int) -> dict[str, Responses]:
    found: dict[str, Responses] = defaultdict(lambda: ([], []))
    flags = table["truncated"].to_pylist() if "truncated" in table.column_names else None
    ids, lists = table["prompt_id"].to_pylist(), table["lengths"].to_pylist()
    for row, (prompt_id, lengths) in enumerate(zip(ids, lists, strict=True)):
        values = _checked(lengths, f"{where}: row {row} (prompt {prompt_id})")
        cut = [value >= longest for value in values] if flags is None else [bool(flag) for flag in flags[row] or ()]
        if len(cut) != len(values):
            raise UserError(f"{where}: row {row} (prompt {prompt_id}): lengths and truncated differ in number")
        found[prompt_id][0].extend(values)
        found[prompt_id][1].extend(cut)
    return {prompt_id: responses for prompt_id, responses in found.items() if responses[0]}


def _checked(lengths: list[float | None] | None, where: str) -> list[float]:
    values = [np.nan if length is None else float(length) for length in lengths or ()]
    bad = [value for value in values if not (np.isfinite(value) and value >= 1)]
    if bad:
        raise UserError(f"{where}: a length is {bad[0]:g}, not a number of tokens of 1 or more; {_WHAT_TO_DO}")
    return values
