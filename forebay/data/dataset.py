"""Data sets as read: every row of a source checked once, kept under `cache/datasets`, found again by content.

Invariants:
- accepted + quarantined + duplicates = read, in each version.
- A version's id is the hash of its source's content, the settings that rows depend on, and its parent: equal ids, equal
  rows. Nothing in a version changes; a later one adds files of its own.
- A version of a source that has grown (lines or row groups at the end of a file, more files) has read only what is
  new. Its parents are the versions whose files it goes on from.
- Of rows with the same prompt the first is kept. A later one is a duplicate, or a bad row if its answer is another.

Memory: a few blocks in flight, and about 150 bytes for each accepted row (to find repeated prompts).
"""

import hashlib
import json
import multiprocessing
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import DataConfig, RunConfig
from forebay.data.images import Pictures
from forebay.data.leaks import likeness
from forebay.data.read import bad_row, checked
from forebay.data.row_groups import RowGroups, row_groups
from forebay.data.schema import QUARANTINE, BadRow, Draft, quarantine_table
from forebay.data.sources import GROWING, Block, Part, Record, parts_of
from forebay.data.start_model import cached
from forebay.errors import RunError
from forebay.launch.main_script import GUARD, require_guard

EDITION = 1
"""Raise it when a change of the code changes what rows are made of."""
DRAFTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("likeness", pa.int64()),
        ("answer_hash", pa.uint32()),
        ("row", pa.int64()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("answer", pa.string()),
        ("source", pa.string()),
        ("verifier", pa.string()),
        ("images", pa.list_(pa.string())),
        ("tags", pa.list_(pa.string())),
    ]
)
COUNTS = ("read", "accepted", "quarantined", "duplicates")
_SMALL = 16 << 20
"""Bytes of a source that are read without other processes (starting them takes seconds)."""
_GROUP = 20_000
"""Rows written at a time."""
_PART, _ROW = 1 << 72, 1 << 32

OnRead = Callable[[int, int, int], None]
"""(bytes of the source done, bytes in all, rows read)."""


@dataclass(frozen=True)
class Dataset:
    """One version, on disk."""

    folder: Path
    manifest: Mapping[str, Any]
    cached: bool

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.manifest["counts"])

    @property
    def parents(self) -> list[str]:
        """Ids of the versions that this one goes on from, oldest first."""
        return list(self.manifest["parents"])

    def files(self, name: str) -> list[Path]:
        """`rows.parquet` or `quarantine.parquet` of the parents and its own."""
        return [self.folder.parent / version / name for version in (*self.parents, self.folder.name)]

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of all accepted rows, in order."""
        tables = [pq.read_table(file, columns=[name]) for file in self.files("rows.parquet")]
        return pa.concat_tables(tables)[name]

    def drafts(self, wanted: np.ndarray) -> Iterator[list[tuple[int, Draft]]]:
        """(row number in its source, draft) of the accepted rows at these places (sorted), some hundreds at a time."""
        start = 0
        for file in self.files("rows.parquet"):
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=1000):
                    low, high = np.searchsorted(wanted, [start, start + batch.num_rows])
                    if low < high:
                        yield [_draft(row) for row in batch.take(pa.array(wanted[low:high] - start)).to_pylist()]
                    start += batch.num_rows


def _draft(row: dict[str, Any]) -> tuple[int, Draft]:
    images, tags = tuple(row["images"]), tuple(row["tags"])
    draft = Draft(tuple(row["messages"]), row["answer"], row["source"], row["verifier"], images, tags=tags)
    return row["row"], draft


def make_dataset(
    source: str, split: str, config: RunConfig, cache: Path, pictures: Pictures | None, on_read: OnRead | None = None
) -> Dataset:
    """Read `source`, or what is new in it, or find it read. Raises `UserError` if it cannot be read."""
    data = config.data
    vision = None if pictures is None else [repr(pictures.vision), data.images.model_dump()]
    settings = data.model_dump(include={"columns", "instruction", "verifiers", "duplicates"})
    key = _hash([EDITION, source, split, settings, vision])
    home = cache / "datasets" / key
    parts = parts_of(source, split, config, cache)
    whole = sorted(home.glob("[!.]*/manifest.json"))  # what another run is making, or died making, begins with a dot
    earlier = [json.loads(path.read_text(encoding="utf-8")) for path in whole]
    sizes: dict[str, set[int]] = defaultdict(set)
    for part in (part for manifest in earlier for part in manifest["parts"]):
        sizes[part["name"]] |= {part["size"], part.get("groups_end", 0)}
    groups = {part.name: row_groups(part.file) for part in parts}
    prints = {part.name: part.fingerprints(sizes[part.name] | {groups[part.name].end}) for part in parts}
    content = [[part.name, part.size, prints[part.name][part.size]] for part in parts]
    same = [m for m in earlier if [[p["name"], p["size"], p["sha256"]] for p in m["parts"]] == content]
    if same and same[0]["reusable"]:
        return Dataset(home / same[0]["version"], same[0], cached=True)
    begun = [manifest for manifest in earlier if _continues(manifest, parts, prints, groups)]
    parent = max(begun, key=lambda manifest: manifest["counts"]["read"], default=None)
    version = _hash([key, content, parent and parent["version"], os.urandom(8).hex() if same else ""])
    ends = {name: _groups_end(found, prints[name]) for name, found in groups.items()}
    making = _Making(data, pictures, parts, parent, on_read, ends)
    cached(home / version, lambda folder: making.write(folder, home, version, content))
    manifest = json.loads((home / version / "manifest.json").read_text(encoding="utf-8"))
    return Dataset(home / version, manifest, cached=False)


def _continues(
    manifest: Mapping[str, Any],
    parts: list[Part],
    prints: Mapping[str, Mapping[int, str]],
    groups: Mapping[str, RowGroups],
) -> bool:
    """Whether every part of a version is still there, unchanged but for what was added at its end."""
    sizes = {part.name: part.size for part in parts}

    def goes_on(part: Mapping[str, Any]) -> bool:
        name, size = part["name"], part["size"]
        if name not in sizes:
            return False
        if prints[name].get(size) == part["sha256"]:
            return bool(sizes[name] == size or (name.endswith(GROWING) and part["ended"]))
        known = _groups_end(groups[name].first(part["lines"]), prints[name])
        return bool(known) and size < sizes[name] and known.items() <= part.items()

    return manifest["reusable"] and all(map(goes_on, manifest["parts"]))


def _groups_end(groups: RowGroups, prints: Mapping[int, str]) -> dict[str, Any]:
    """What a manifest says of a part's row groups, so that it is known again when there are more."""
    if groups.end not in prints or not groups.end:
        return {}
    return dict(groups_end=groups.end, groups_sha256=prints[groups.end], columns=groups.columns)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class _Making:
    """One version while it is made."""

    data: DataConfig
    pictures: Pictures | None
    parts: list[Part]
    parent: Mapping[str, Any] | None
    on_read: OnRead | None
    row_groups: Mapping[str, Mapping[str, Any]]
    """By the name of a part, what its manifest says of them."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    seen: dict[int, int] = field(default_factory=dict)
    """Likeness of a prompt -> its part, row and hash of its answer, packed."""
    reusable: bool = True
    """False: images lie in files beside the source, whose content is not part of the version's id."""

    def write(self, folder: Path, home: Path, version: str, content: list[list[Any]]) -> None:
        known = {part["name"]: part for part in self.parent["parts"]} if self.parent else {}
        parents: list[str] = []
        if self.parent:
            self.counts |= self.parent["counts"]
            parents = [*self.parent["parents"], self.parent["version"]]
            self._remember(Dataset(home / self.parent["version"], self.parent, cached=True))
        total, done, lines = sum(part.size for part in self.parts), 0, []
        with (
            pq.ParquetWriter(folder / "rows.parquet", DRAFTS) as rows,
            pq.ParquetWriter(folder / "quarantine.parquet", QUARANTINE) as quarantine,
            _Workers(self.data.workers, total - sum(part["size"] for part in known.values())) as workers,
        ):
            out = _Out(rows), _Out(quarantine)
            for index, part in enumerate(self.parts):
                old = known.get(part.name, {"size": 0, "lines": 0})
                lines.append(old["lines"])
                if old["size"] < part.size:
                    blocks = part.blocks(old["size"], old["lines"] + 1)
                    for digest in workers.map(blocks, part.name, self.data, self.pictures):
                        lines[index] += digest.lines
                        self._take(digest, index, *out)
                        if self.on_read:
                            self.on_read(done + digest.end, total, self.counts["read"])
                done += part.size
            for writer in out:
                writer.flush()
        if self.counts["read"] != sum(self.counts[name] for name in COUNTS[1:]):
            raise RunError(f"{self.parts[0].name}: the account of rows does not add up ({self.counts}): a bug")
        parts = [
            dict(name=name, size=size, sha256=sha, lines=count, ended=_ended(part), **self.row_groups[name])
            for (name, size, sha), count, part in zip(content, lines, self.parts, strict=True)
        ]
        manifest = dict(version=version, parents=parents, counts=self.counts, reusable=self.reusable, parts=parts)
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def _remember(self, parent: Dataset) -> None:
        places = {part.name: place for place, part in enumerate(self.parts)}
        for file in parent.files("rows.parquet"):
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(columns=["prompt_id", "likeness", "answer_hash", "row", "source"]):
                    for name, like, answer, row, source in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                        self.seen[self._key(name, like)] = places[source] * _PART + row * _ROW + answer

    def _key(self, prompt_id: str, like: int) -> int:
        return like if self.data.duplicates == "normalised" else int(prompt_id, 16)

    def _take(self, digest: "_Digest", part: int, rows: "_Out", quarantine: "_Out") -> None:
        """Keep what is new in a block."""
        batch, kept, bad = digest.rows, [], digest.bad
        names = ("prompt_id", "likeness", "answer_hash", "row")
        for place, (name, like, answer, row) in enumerate(
            zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        ):
            key = self._key(name, like)
            earlier = self.seen.get(key)
            if earlier is None:
                self.seen[key] = part * _PART + row * _ROW + answer
                kept.append(place)
            elif earlier % _ROW == answer:
                self.counts["duplicates"] += 1
            else:
                bad.append(self._contradiction(batch.slice(place, 1).to_pylist()[0], earlier, part))
        self.counts["read"] += digest.read
        self.counts["accepted"] += len(kept)
        self.counts["quarantined"] += len(bad)
        self.reusable &= not digest.by_path
        rows.add(pa.Table.from_batches([batch.take(pa.array(kept, pa.int64()))]))
        if bad:
            quarantine.add(quarantine_table(sorted(bad, key=lambda one: one.row)))

    def _contradiction(self, row: dict[str, Any], earlier: int, part: int) -> BadRow:
        where = f"row {earlier % _PART // _ROW}"
        if earlier // _PART != part:
            where += f" of {self.parts[earlier // _PART].name}"
        reason = f"repeats the prompt of {where} with another answer"
        return bad_row(row["row"], row["source"], reason, {"messages": row["messages"], "answer": row["answer"]})


def _ended(part: Part) -> bool:
    """Whether a file's last line is complete, so that what is added to it is new lines."""
    if part.file is None or not part.size:
        return False
    with part.file.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class _Out:
    """A Parquet file that gets its rows in large groups."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer, self._waiting, self._rows = writer, list[pa.Table](), 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows += table.num_rows
        if self._rows >= _GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._rows = [], 0


@dataclass(frozen=True, slots=True)
class _Digest:
    """A block, checked."""

    read: int
    lines: int
    end: int
    """See `Block.end`."""
    rows: pa.RecordBatch
    bad: list[BadRow]
    by_path: bool


def digest(block: Block, part: str, data: DataConfig, pictures: Pictures | None) -> _Digest:
    """Check the rows of a block: pure, so that any process may do it."""
    drafts: list[tuple[int, Draft]] = []
    bad, read, by_path = [], 0, False
    for number, record in block.records():
        read += 1
        by_path = by_path or _by_path(record, data)
        item = checked(number, record, part, data, pictures)
        if isinstance(item, BadRow):
            bad.append(item)
        else:
            drafts.append((number, item))
    columns = [
        [draft.prompt_id for _, draft in drafts],
        [likeness(draft.messages, draft.images) for _, draft in drafts],
        [zlib.crc32(draft.answer.encode()) for _, draft in drafts],
        [number for number, _ in drafts],
        [draft.messages for _, draft in drafts],
        [draft.answer for _, draft in drafts],
        [draft.source for _, draft in drafts],
        [draft.verifier for _, draft in drafts],
        [draft.images for _, draft in drafts],
        [draft.tags for _, draft in drafts],
    ]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, DRAFTS.types, strict=True)]
    return _Digest(read, block.lines, block.end, pa.RecordBatch.from_arrays(arrays, schema=DRAFTS), bad, by_path)


def _by_path(record: Record, data: DataConfig) -> bool:
    """Whether images of the row lie in files of their own."""
    value = record.get(data.columns.images) if isinstance(record, Mapping) else None
    if value is None:
        return False
    items = value if isinstance(value, list) else [value]
    paths = (item.get("path") if isinstance(item, Mapping) and not item.get("bytes") else item for item in items)
    return any(isinstance(path, str) and path and not path.startswith("data:") for path in paths)


class _Workers:
    """Processes that check blocks; none for small sources. Results come in order, a few blocks ahead."""

    def __init__(self, wanted: int | None, size: int) -> None:
        count = wanted or (len(os.sched_getaffinity(0)) if size > _SMALL else 1)
        if count > 1:
            require_guard()
        # Not forked: this process has threads.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context) if count > 1 else None
        self._ahead = 2 * count

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(self, blocks: Iterator[Block], *args: Any) -> Iterator[_Digest]:
        if self._pool is None:
            yield from (digest(block, *args) for block in blocks)
            return
        try:
            yield from self._ahead_of_time(self._pool, blocks, *args)
        except BrokenProcessPool:
            raise RunError(
                "a process that reads the data has died: lower data.workers if there is no memory left; a script that "
                f"calls Forebay does so under `if {GUARD}:`"
            ) from None

    def _ahead_of_time(self, pool: ProcessPoolExecutor, blocks: Iterator[Block], *args: Any) -> Iterator[_Digest]:
        waiting: deque[Future[_Digest]] = deque()
        for block in blocks:
            waiting.append(pool.submit(digest, block, *args))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
