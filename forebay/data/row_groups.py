"""Row groups of Parquet files, by which a file that a writer has made again with more rows can be read from where it
ended: its first bytes are then what they were, up to the end of the last row group that it had."""

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class RowGroups:
    """Of one file; without any if it is none of Parquet or cannot be read (reading it says so)."""

    columns: str = ""
    """Hash of the names and types."""
    ends: dict[int, int] = field(default_factory=dict)
    """Rows up to the end of a group -> byte at which it ends, in order."""

    @property
    def rows(self) -> int:
        return max(self.ends, default=0)

    @property
    def end(self) -> int:
        """Of the last group; everything after it changes when rows are added."""
        return self.ends.get(self.rows, 0)

    def first(self, rows: int) -> "RowGroups":
        """Those that hold the first so many rows; none if a group has rows on both sides."""
        return RowGroups(self.columns, {rows: self.ends[rows]}) if rows in self.ends else RowGroups()


def row_groups(path: Path | None) -> RowGroups:
    """From its footer."""
    if path is None or path.suffix != ".parquet":
        return RowGroups()
    try:
        with pq.ParquetFile(path) as file:
            kinds = [str(file.schema_arrow.remove_metadata())]
            for place in range(len(file.schema)):
                column = file.schema.column(place)
                kinds.append(f"{column.path} {column.physical_type} {column.logical_type}")
            columns = hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:16]
            rows, ends = 0, {}
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                chunks = [group.column(place) for place in range(group.num_columns)]
                rows += group.num_rows
                ends[rows] = max(
                    (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
                    for chunk in chunks
                )
    except (OSError, ValueError, pa.ArrowException):
        return RowGroups()
    return RowGroups(columns, ends)


def groups_from(file: pq.ParquetFile, row: int) -> list[int]:
    """Numbers of the row groups from the one on that begins with this row (from 1)."""
    numbers = range(file.metadata.num_row_groups)
    before = accumulate((file.metadata.row_group(number).num_rows for number in numbers), initial=0)
    return [number for number, rows in zip(numbers, before, strict=False) if rows >= row - 1]
