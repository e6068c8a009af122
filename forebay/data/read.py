"""Reading of the user's data: any source becomes numbered records, checked one by one.

Invariants:
- Every row that is read is either a `Draft` or a `BadRow`; none disappears.
- A row is bad for its own sake only, never because of the order of rows (but a repeated prompt is bad from its second
  appearance on).
- A file that cannot be read at all is the user's mistake: `UserError`, one line.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import DataConfig
from forebay.data.images import MARK, Pictures, image_source
from forebay.data.schema import BadRow, Draft, Message
from forebay.errors import DataError, UserError

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_SHOWN = 300
_ROLES = ("system", "user", "assistant")

Record = Mapping[str, Any] | str
"""One row's columns, or the reason why there are none."""


def read_source(data: DataConfig, pictures: Pictures | None = None) -> Iterator[tuple[int, Draft | BadRow]]:
    """Rows of `data.source`, numbered from 1; their images go to `pictures`. Raises `UserError` if it cannot be
    read."""
    first_seen: dict[str, int] = {}
    for number, record in enumerate(_records(data), 1):
        try:
            draft = draft_of(record, data, pictures)
            earlier = first_seen.setdefault(draft.prompt_id, number)
            if earlier != number:
                raise DataError(f"repeats the prompt of row {earlier}")
        except DataError as error:
            yield number, bad_row(number, data.source, str(error), record)
        else:
            yield number, draft


def bad_row(number: int, source: str, reason: str, content: Any) -> BadRow:
    """`content` is cut, and written as JSON where possible."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    return BadRow(number, source, reason, text.encode(errors="replace").decode()[:_SHOWN])


def draft_of(record: Record, data: DataConfig, pictures: Pictures | None = None) -> Draft:
    """Check one record; raises `DataError` with the reason. `pictures`: None if the model reads no images."""
    if isinstance(record, str):
        raise DataError(record)
    for field, column in (("prompt", data.columns.prompt), ("answer", data.columns.answer)):
        if column not in record:
            there = ", ".join(map(str, record)) or "none"
            raise DataError(f"no column {column!r} (columns here: {there}; set data.columns.{field})")
    messages = _messages(record[data.columns.prompt])
    answer, verifier = _answer(record[data.columns.answer]), _verifier(record, data)
    images = _images(record.get(data.columns.images), messages, data, pictures)
    return Draft(messages, answer, data.source, verifier, images)


def _images(value: Any, messages: tuple[Message, ...], data: DataConfig, pictures: Pictures | None) -> tuple[str, ...]:
    """Kept; one for each mark in the text, if there are marks."""
    items = [] if value is None or value == "" else value if isinstance(value, list) else [value]
    if not items:
        return ()
    if pictures is None:
        raise DataError(f"the prompt has {len(items)} images, but the model of model.path reads none")
    if len(items) > data.images.max_per_prompt:
        raise DataError(f"{len(items)} images; data.images.max_per_prompt is {data.images.max_per_prompt}")
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks not in (0, len(items)):
        raise DataError(f"{len(items)} images, but {marks} times {MARK} in the prompt")
    path = Path(data.source)
    folder = Path(data.images.folder) if data.images.folder else path.parent if path.suffix in SUFFIXES else None
    return tuple(pictures.keep(image_source(item, folder), data.images) for item in items)


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise DataError(f"the prompt is {_kind(value)}, not text or a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise DataError(f"message {number} of the prompt is not {{role: {' | '.join(_ROLES)}, content: text}}")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise DataError(f"message {number} of the prompt is not valid Unicode") from None
        messages.append({"role": role, "content": content})
    if not messages or not messages[-1]["content"].strip():
        raise DataError("the prompt is empty")
    if messages[-1]["role"] != "user":
        raise DataError(f"the prompt ends with a message of role {messages[-1]['role']}, not user")
    return tuple(messages)


def _answer(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError("the answer is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"the answer is {value}")
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
        text.encode()
    except (TypeError, ValueError):
        raise DataError(f"the answer is {_kind(value)}, which is not plain JSON") from None
    return text


def _verifier(record: Mapping[str, Any], data: DataConfig) -> str:
    value = record.get(data.columns.verifier)
    if value is not None and not isinstance(value, str):
        raise DataError(f"the verifier (data.columns.verifier) is {_kind(value)}, not a name")
    return value or ""


def _kind(value: Any) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"


def _records(data: DataConfig) -> Iterator[Record]:
    path = Path(data.source)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise UserError(f"data.source: {path}: no such file")
        yield from _file_records(path)
    elif path.exists():
        raise UserError(f"data.source: {path}: give a file that ends in {', '.join(SUFFIXES)}")
    else:
        yield from _hub_records(data)


def _file_records(path: Path) -> Iterator[Record]:
    readers = {".parquet": _parquet, ".jsonl": _json_lines, ".json": _json, ".csv": _csv}
    try:
        yield from readers[path.suffix](path)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"data.source: {path}: cannot be read ({str(error).splitlines()[0]})") from None


def _parquet(path: Path) -> Iterator[Record]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if line.strip():
                yield _parsed(line)


def _parsed(line: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    return value if isinstance(value, dict) else f"is {_kind(value)}, not an object with columns"


def _json(path: Path) -> Iterator[Record]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.source: {path}: not valid JSON ({error})") from None
    if not isinstance(value, list):
        raise UserError(f"data.source: {path}: must be a list of objects (one object a line is .jsonl)")
    for item in value:
        yield item if isinstance(item, dict) else f"is {_kind(item)}, not an object with columns"


def _csv(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for record in csv.DictReader(file, strict=True):
            if None in record:
                yield "has more fields than the header"
            else:
                yield {name: value for name, value in record.items() if value is not None}


def _hub_records(data: DataConfig) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_dataset(data.source, split=data.hub_split)
    except (OSError, ValueError, RuntimeError) as error:  # missing, offline, no such split, not a data set
        raise UserError(
            f"data.source: {data.source}: neither a file ending in {', '.join(SUFFIXES)} nor a data set that can be "
            f"fetched from the Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from None
    yield from rows
