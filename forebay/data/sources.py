"""Sources of rows: files, directories and S3 prefixes of files, and data sets on the Hugging Face hub.

Invariants:
- A source is read in blocks of a few MB, in order: memory does not grow with it (`.json` lists apart, which are read
  whole and limited in size).
- Each line or row of a file gives one record or one reason why there is none.
- A part that cannot be read at all is the user's mistake: `UserError`, one line.
"""

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import RunConfig
from forebay.config.data import refuse_credentials
from forebay.data.hub import load_from_hub
from forebay.data.row_groups import groups_from
from forebay.errors import UserError
from forebay.storage.objects import open_objects

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
GROWING = (".jsonl", ".csv")
"""Formats whose files grow at the end, the rest unchanged."""
BLOCK = 2 << 20
"""Bytes of a file read at a time."""
ROWS = 2000
"""Most rows of a block."""
LONGEST_LINE = 32 << 20
LONGEST_LIST = 256 << 20
"""Bytes of a `.json` file, which has to be read whole."""
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|dev|eval)(?=[-_./])")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of a record."""

    reason: str
    content: str = ""


Record = Mapping[str, Any] | Unreadable


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows, mostly still as bytes so that another process can parse them."""

    first: int
    """Number of the first line or row, from 1."""
    lines: int
    """Lines or rows in it, empty lines too."""
    end: int = 0
    """Bytes of the file (rows of a data set of the hub) that are read by then, as far as is known."""
    lines_of_json: bytes = b""
    arrow: bytes = b""
    """A stream of Arrow's IPC."""
    parsed: tuple[Record, ...] = ()

    def records(self) -> Iterator[tuple[int, Record]]:
        """Numbered; empty lines are passed over."""
        if self.arrow:
            yield from enumerate(pa.ipc.open_stream(self.arrow).read_all().to_pylist(), self.first)
        elif self.parsed:
            yield from enumerate(self.parsed, self.first)
        else:
            for number, line in enumerate(self.lines_of_json.split(b"\n"), self.first):
                if line.strip():
                    yield number, _parsed(line)


@dataclass(frozen=True)
class Part:
    """One file, or one data set of the hub."""

    name: str
    """As messages and rows call it."""
    file: Path | None
    """Here or fetched; None for the hub."""
    hub: Any = None

    @property
    def size(self) -> int:
        """Bytes, or rows of a data set of the hub."""
        return int(self.hub.num_rows) if self.file is None else self.file.stat().st_size

    def fingerprints(self, sizes: set[int]) -> dict[int, str]:
        """Size -> SHA-256 of so many bytes from the start, for the whole part and the `sizes` below it."""
        if self.file is None:
            return {self.size: hashlib.sha256(self.hub._fingerprint.encode()).hexdigest()}
        found, digest, at = {}, hashlib.sha256(), 0
        with self.file.open("rb") as file:
            for end in sorted({size for size in sizes if size < self.size} | {self.size}):
                while at < end:
                    piece = file.read(min(BLOCK, end - at))
                    if not piece:
                        break
                    digest.update(piece)
                    at += len(piece)
                found[end] = digest.copy().hexdigest()
        return found

    def blocks(self, start: int = 0, first: int = 1) -> Iterator[Block]:
        """From byte `start` on (of a growing format), whose line or row has the number `first`; of Parquet, from the
        row group that begins with it."""
        readers = {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet, ".json": _json_list, ".arrow": _arrow}
        try:
            if self.file is None:
                yield from _numbered(self.hub.with_format("arrow").iter(_most_rows(self.hub.data.nbytes, self.size)), 1)
            else:
                yield from readers[self.file.suffix](self.file, start, first)
        except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            # A binary file without its end or with holes: most often a download that broke off.
            binary = self.file is not None and self.file.suffix in (".parquet", ".arrow")
            hint = "; it is damaged or incomplete: fetch or write it again" if binary else ""
            raise UserError(f"data.source: {self.name}: cannot be read ({reason[:200].rstrip('.')}){hint}") from None


def parts_of(source: str, split: str, config: RunConfig, cache: Path) -> list[Part]:
    """The parts of a source, in order. `cache`: where objects of S3 are fetched to."""
    if source.startswith("s3://"):
        return _fetched(source, split, config, cache)
    if source.startswith("builtin:"):
        raise UserError(f"data.source: {source}: no file: `forebay data prepare` draws the tasks of a profile")
    if not source:
        raise UserError("data.source: is empty: name a file, a folder (`.` is this one) or a data set of the hub")
    path = Path(source)
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file())
        names = _of_split([file.relative_to(path).as_posix() for file in found], split)
        if not names:
            raise UserError(f"data.source: {path}: no file in it ends in {', '.join(SUFFIXES)}")
        return [Part(str(path / name), path / name) for name in names]
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise UserError(f"data.source: {path}: no such file")
        return [Part(source, path)]
    if path.exists():
        raise UserError(f"data.source: {path}: give a file that ends in {', '.join(SUFFIXES)}, or a directory of such")
    # Names on the hub are NAME or OWNER/NAME.
    if source.startswith((".", "/", "~")) or (source.count("/") != 1 and "/" in source) or _in_folder(path):
        raise UserError(f"data.source: {source}: no such file or folder")
    return [Part(source, None, load_from_hub(source, split))]


def _in_folder(path: Path) -> bool:
    return path.parent != Path() and path.parent.is_dir()


def _of_split(names: list[str], split: str) -> list[str]:
    """Files of rows; not those whose names tell another split (`test-00000-of-00004.parquet`, `data/test.jsonl`), if
    there are files of this one."""
    visible = [name for name in names if not any(piece.startswith((".", "_")) for piece in name.split("/"))]
    rows = sorted(name for name in visible if name.endswith(SUFFIXES))
    rows = [name for name in rows if not name.endswith(".json")] or rows  # beside data, .json describes them
    named = {name: match[1] for name in rows if (match := _SPLIT.search(name))}
    return [name for name in rows if named.get(name, split) == split] if split in named.values() else rows


def _fetched(source: str, split: str, config: RunConfig, cache: Path) -> list[Part]:
    single = source.endswith(SUFFIXES)
    root = source.rpartition("/")[0] if single else source.rstrip("/")
    try:
        refuse_credentials(source)
    except ValueError as error:
        raise UserError(f"data.source: {error}") from None
    if not root.removeprefix("s3:").strip("/"):
        raise UserError(f"data.source: {source}: write s3://BUCKET/PREFIX, or s3://BUCKET/NAME.parquet")
    objects = open_objects(root, config.storage.endpoint_url)
    keys = [source.rpartition("/")[2]] if single else _of_split(objects.list_keys(), split)
    if not keys:
        raise UserError(f"data.source: {source}: nothing under it ends in {', '.join(SUFFIXES)}")
    folder = cache / "objects" / hashlib.sha256(root.encode()).hexdigest()[:16]
    parts = []
    for key in keys:
        target = folder / key
        unfinished = target.with_name(target.name + ".unfinished")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            objects.download(key, unfinished)
        except FileNotFoundError:
            raise UserError(f"data.source: {root}/{key}: no such object") from None
        unfinished.replace(target)
        parts.append(Part(f"{root}/{key}", target))
    return parts


def _numbered(tables: Iterator[Any], row: float, first: int = 1) -> Iterator[Block]:
    """Arrow tables or batches as blocks of at most `ROWS` rows and about 8 MB. `row`: bytes of the file that one takes,
    on average."""
    for table in tables:
        batches = table.to_batches() if isinstance(table, pa.Table) else [table]
        for batch in batches:
            batch.validate()  # of a damaged file, whose buffers may be too short
            _check_distinct(batch.schema.names)
            for column in batch.schema:
                _check_names(column)
            most = _most_rows(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, most):
                piece = batch.slice(start, most)
                end = int((first - 1 + piece.num_rows) * row)
                try:
                    piece.validate(full=True)
                except pa.ArrowInvalid:
                    records = tuple(_sound(piece.slice(place, 1)) for place in range(piece.num_rows))
                    yield Block(first, piece.num_rows, end, parsed=records)
                else:
                    yield Block(first, piece.num_rows, end, arrow=_stream(piece))
                first += piece.num_rows


def _check_names(column: pa.Field) -> None:
    """Raises `ValueError` if the name of a column, or of one within it, is no text."""
    str(column.name)
    kind = column.type
    if pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            _check_names(kind.field(place))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_names(kind.value_field)


def _stream(batch: pa.RecordBatch) -> bytes:
    """Pickle would take along the whole that a batch is a slice of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _sound(row: pa.RecordBatch) -> Record:
    try:
        row.validate(full=True)
    except pa.ArrowInvalid as error:
        return Unreadable(f"not a valid row of Arrow ({str(error).splitlines()[0][:150]})")
    return dict(row.to_pylist()[0])


def _most_rows(size: int, rows: int) -> int:
    """Rows of a block, if so many take so many bytes: images make rows of MBs."""
    return max(1, min(ROWS, 4 * BLOCK * rows // max(1, size)))


def _parquet(path: Path, _start: int, first: int) -> Iterator[Block]:
    with pq.ParquetFile(path, buffer_size=BLOCK) as file:
        rows = max(1, file.metadata.num_rows)
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        batches = file.iter_batches(_most_rows(size, rows), row_groups=groups_from(file, first))
        yield from _numbered(batches, path.stat().st_size / rows, first)


def _arrow(path: Path, _start: int, _first: int) -> Iterator[Block]:
    """Both forms of Arrow's IPC: with a footer, or a stream (as Hugging Face's `save_to_disk` writes)."""
    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            yield from _numbered(iter(pa.ipc.open_stream(file)), 0)
        else:
            yield from _numbered((reader.get_batch(i) for i in range(reader.num_record_batches)), 0)


def _json_lines(path: Path, start: int, first: int) -> Iterator[Block]:
    with path.open("rb") as file:
        skip_mark(file)
        file.seek(max(start, file.tell()))
        while block := file.read(BLOCK):
            if not block.endswith(b"\n"):
                block += file.readline(LONGEST_LINE)
            lines = block.count(b"\n") + (not block.endswith(b"\n"))
            if not block.endswith(b"\n") and file.peek(1):
                whole, _, cut = block.rpartition(b"\n")
                if whole:
                    yield Block(first, lines - 1, lines_of_json=whole)
                shown = cut[:300].decode(errors="replace")
                del block, cut
                _pass_line(file)
                reason = f"the line is longer than {LONGEST_LINE >> 20} MB"
                yield Block(first + lines - 1, 1, file.tell(), parsed=(Unreadable(reason, shown),))
            else:
                yield Block(first, lines, file.tell(), block)
            first += lines


def skip_mark(file: BinaryIO) -> None:
    """Past the byte-order mark of UTF-8; raises `ValueError` for UTF-16."""
    mark = file.read(3)
    if mark[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError("it is UTF-16: save it as UTF-8")
    file.seek(3 if mark == b"\xef\xbb\xbf" else 0)


def _pass_line(file: BinaryIO) -> None:
    while (piece := file.readline(BLOCK)) and not piece.endswith(b"\n"):
        pass


def _parsed(line: bytes) -> Record:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Unreadable(f"not valid UTF-8 (byte {error.start + 1} of the line)", line[:300].decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not valid JSON ({error})", line[:300].decode(errors="replace"))
    return _object(value)


def _object(value: Any) -> Record:
    if isinstance(value, dict):
        return value
    return Unreadable(f"is of type {type(value).__name__}, not an object with columns", str(value)[:300])


def _json_list(path: Path, _start: int, _first: int) -> Iterator[Block]:
    if path.stat().st_size > LONGEST_LIST:
        raise ValueError(f"more than {LONGEST_LIST >> 20} MB in a single list: write one object a line, as .jsonl")
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"data.source: {path}: not valid JSON ({error})") from None
    if not isinstance(value, list):
        raise UserError(f"data.source: {path}: must be a list of objects (one object a line is .jsonl)")
    for start in range(0, len(value), ROWS):
        piece = tuple(_object(item) for item in value[start : start + ROWS])
        yield Block(start + 1, len(piece), parsed=piece)


def _csv(path: Path, start: int, first: int) -> Iterator[Block]:
    csv.field_size_limit(LONGEST_LINE)
    with path.open("rb") as file:
        skip_mark(file)
        header = next(_fields(file, 0), None)
        if header is None:
            return
        _check_distinct(header)
        if start:
            file.seek(start)
        rows: list[Record] = []
        for fields in _fields(file, first):
            if len(fields) > len(header):
                rows.append(Unreadable("has more fields than the header", ",".join(fields)[:300]))
            else:
                rows.append(dict(zip(header, fields, strict=False)))
            if len(rows) == ROWS:
                yield Block(first, ROWS, file.tell(), parsed=tuple(rows))
                first, rows = first + ROWS, []
        if rows:
            yield Block(first, len(rows), file.tell(), parsed=tuple(rows))


def _fields(file: BinaryIO, row: int) -> Iterator[list[str]]:
    """Of each row, the first of which is the `row`th (0: the header); empty lines are passed over. Raises `ValueError`
    that names the row."""
    reader = csv.reader(_decoded(file), strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            where = f"row {row}" if row else "the header"
            raise ValueError(f"{where}: {_remedy(str(error))}") from None
        if fields is None:
            return
        if fields:
            yield fields
            row += 1


def _remedy(error: str) -> str:
    if "field" in error and "limit" in error:
        most = f"{LONGEST_LINE >> 20} MB"
        return f"a line or field of more than {most}: shorten it, close its quote, or write .jsonl or .parquet"
    if error.startswith("unexpected end"):
        return 'a quote is not closed: close it (a quote within a field is written twice: "")'
    return f'{error}: a field with quotes stands in quotes, and each quote in it is written twice ("")'


def _check_distinct(names: list[str]) -> None:
    """Raises `ValueError` for a column that there is twice: a row could keep only one."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"two columns have the name {twice[0][:60]!r}: rename one")


def _decoded(file: BinaryIO) -> Iterator[str]:
    """Lines; bytes that are not UTF-8 become characters that no valid text has, and the row is refused for them."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise csv.Error("line larger than field limit")
        yield line.decode(errors="surrogateescape")
