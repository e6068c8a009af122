"""The canonical row, as Parquet: what every later stage reads.

Invariants:
- `prompt_id` is the first 16 hex digits of the SHA-256 of the canonical JSON of `messages`, and of the images' names
  if there are any: equal prompts, equal ids.
- `prompt_ids` is the chat template applied with the start model's tokenizer, ready for an engine: an image is as many
  image tokens as it has features.
- `answer` is JSON; the verifier gets what it decodes to.
- `verifier` names the row's own verifier; "" leaves it to `reward.name`.
- `tags` are what results can be told apart by, such as family and difficulty.
- Columns that are new are empty in older files.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import RunError

Message = Mapping[str, str]
"""{"role": ..., "content": ...}"""

ROWS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("source", pa.string()),
        ("verifier", pa.string()),
        ("images", pa.list_(pa.string())),
        ("tags", pa.list_(pa.string())),
        ("split", pa.string()),
    ]
)
QUARANTINE = pa.schema(
    [("row", pa.int64()), ("source", pa.string()), ("reason", pa.string()), ("content", pa.string())]
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that no tokenizer has seen yet."""

    messages: tuple[Message, ...]
    answer: str
    """JSON."""
    source: str
    verifier: str = ""
    images: tuple[str, ...] = ()
    """Names of kept images (`forebay.data.images`), in the order in which they stand in the prompt."""
    drawn: tuple[bytes, ...] = ()
    """Image files of a built-in task that are not kept yet."""
    tags: tuple[str, ...] = ()
    """By which evaluation groups its results; `column:value` of data that were read."""

    @property
    def prompt(self) -> str:
        """Text of the last message."""
        return self.messages[-1]["content"]

    @property
    def prompt_id(self) -> str:
        return prompt_id(self.messages, self.images)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, complete."""

    prompt_id: str
    messages: tuple[Message, ...]
    prompt: str
    """Text of the last user message."""
    prompt_ids: tuple[int, ...]
    answer: str
    source: str
    verifier: str = ""
    images: tuple[str, ...] = ()
    """Names of kept images, in order."""
    tags: tuple[str, ...] = ()
    split: str = ""
    """train, validation, test."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was set aside."""

    row: int
    """Counted from 1: the line of .jsonl files, else the row."""
    source: str
    reason: str
    content: str
    """What was read, cut to a few hundred characters."""


def prompt_id(messages: Sequence[Message], images: Sequence[str] = ()) -> str:
    """Stable across machines and versions."""
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256("\n".join([text, *images]).encode()).hexdigest()[:16]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replaces `path` in one move."""
    columns = {name: [getattr(row, name) for row in rows] for name in ROWS.names}
    _write(path, [pa.table(columns, schema=ROWS)])


def read_rows(path: Path) -> list[Row]:
    """Raises `RunError` if the file is missing or of another schema."""
    try:
        table = pq.read_table(path, schema=ROWS)
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read as Forebay's rows ({str(error).splitlines()[0]})") from None
    return [
        Row(
            **{
                **row,
                "messages": tuple(row["messages"]),
                "prompt_ids": tuple(row["prompt_ids"]),
                # Files of before there were these.
                "verifier": row["verifier"] or "",
                "images": tuple(row["images"] or ()),
                "tags": tuple(row["tags"] or ()),
                "split": row["split"] or "",
            }
        )
        for row in table.to_pylist()
    ]


def write_quarantine(path: Path, bad: Sequence[BadRow], earlier: Sequence[Path] = ()) -> None:
    """The rows of the files `earlier`, then `bad`; replaces `path` in one move."""
    tables = (table for name in earlier for table in pq.ParquetFile(name).iter_batches())
    _write(path, itertools.chain((pa.Table.from_batches([table]) for table in tables), [quarantine_table(bad)]))


def quarantine_table(bad: Sequence[BadRow]) -> pa.Table:
    """In the schema `QUARANTINE`."""
    return pa.table({name: [getattr(row, name) for row in bad] for name in QUARANTINE.names}, schema=QUARANTINE)


def _write(path: Path, tables: Iterable[pa.Table]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    tables = iter(tables)
    first = next(tables)
    with pq.ParquetWriter(unfinished, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)
    unfinished.replace(path)
