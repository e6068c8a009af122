"""What a newcomer wants to know of a file: what is in it, what Forebay would do with it, what to put right.

Invariants:
- Looks at no more than `ROWS` rows and `BYTES` bytes, of the first files, whatever the source's size; says so.
- A source that cannot be read at all is one line (`UserError`); bad rows are one line for each kind of reason.
- Images are looked at, and kept nowhere.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from forebay.config import ImagesConfig, RunConfig
from forebay.data.counted import counted
from forebay.data.layouts import NAMES, layout_of
from forebay.data.leaks import likeness
from forebay.data.read import checked
from forebay.data.schema import BadRow, Draft
from forebay.data.sources import Part, Record, Unreadable, parts_of
from forebay.errors import DataError

ROWS = 20_000
BYTES = 256 << 20
_SHOWN = 160
_KINDS = {
    dict: "object",
    list: "list",
    str: "text",
    type(None): "empty",
    bytes: "bytes",
    float: "number",
    int: "number",
}


@dataclass
class Findings:
    """Of the rows that were looked at."""

    read: int = 0
    whole: bool = True
    """Whether these are all rows of the source."""
    good: int = 0
    repeated: int = 0
    contradictory: int = 0
    images: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    """Column -> kinds of its values."""
    layouts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, tuple[int, BadRow]] = field(default_factory=dict)
    """Reason without its numbers -> (how often, the first such row)."""
    origins: Counter[str] = field(default_factory=Counter)
    """Values of verl's column `data_source`."""
    example: Draft | None = None


class _Looker:
    """Keeps no image."""

    def keep(self, source: "bytes | Image.Image", config: ImagesConfig) -> str:
        if not isinstance(source, bytes):
            return hashlib.sha256(source.tobytes()).hexdigest()
        if len(source) > config.max_mb * 1e6:
            raise DataError(f"an image has {len(source) / 1e6:.1f} MB; data.images.max_mb is {config.max_mb:g}")
        try:
            with Image.open(io.BytesIO(source)) as image:
                image.verify()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"an image cannot be read ({str(error).splitlines()[0][:100]})") from None
        return hashlib.sha256(source).hexdigest()


def inspect(source: str, config: RunConfig, cache: Path) -> list[tuple[str, str]]:
    """(name, value) lines. Raises `UserError` if the source cannot be read."""
    data = config.data.model_copy(update={"source": source})
    parts = parts_of(source, data.hub_split, config, cache)
    found = _look(parts, config)
    return [
        ("source", _described(parts)),
        ("looked at", f"{counted(found.read, 'row')}" + ("" if found.whole else ": the first ones")),
        *_columns(found),
        *_outcome(found),
        *_advice(found, named=len(parts) > 1),
    ]


def _look(parts: list[Part], config: RunConfig) -> Findings:
    found, answers, before = Findings(), dict[int, str](), 0
    for part in parts:
        for block in part.blocks():
            for number, record in block.records():
                _look_at(number, record, part, found, answers, config)
            if found.read >= ROWS or (part.file is not None and before + block.end >= BYTES):
                found.whole = part is parts[-1] and block.end >= part.size
                return found
        before += part.size
    return found


def _look_at(
    number: int, record: Record, part: Part, found: Findings, answers: dict[int, str], config: RunConfig
) -> None:
    """One row. `answers`: by likeness, of the prompts before it."""
    found.read += 1
    if not isinstance(record, Unreadable):
        _note(record, found, config)
    item = checked(number, record, part.name, config.data, _Looker())
    if isinstance(item, BadRow):
        key = re.sub(r"\d+", "N", item.reason)
        count, first = found.reasons.get(key, (0, item))
        found.reasons[key] = count + 1, first
        return
    like = likeness(item.messages, item.images)
    if like in answers:
        found.repeated += answers[like] == item.answer
        found.contradictory += answers[like] != item.answer
        return
    answers[like] = item.answer
    found.good += 1
    found.images += bool(item.images)
    found.example = found.example or item


def _note(record: Mapping[str, Any], found: Findings, config: RunConfig) -> None:
    for name, value in record.items():
        kinds = found.columns.setdefault(name, Counter()) if len(found.columns) < 200 else Counter()
        kinds[_KINDS.get(type(value), type(value).__name__)] += 1
    origin = record.get("data_source")
    if isinstance(origin, str) and len(found.origins) < 100:
        found.origins[origin] += 1
    try:
        found.layouts[layout_of(record, config.data.columns).name] += 1
    except DataError:
        found.layouts["none"] += 1


def _described(parts: list[Part]) -> str:
    if parts[0].file is None:
        return f"{parts[0].name}: data set of the Hugging Face hub, {counted(parts[0].size, 'row')}"
    size = sum(part.size for part in parts)
    many = f"{len(parts)} files, the first is " if len(parts) > 1 else ""
    rows = ""
    if len(parts) == 1 and parts[0].file.suffix == ".parquet":
        rows = f", {counted(pq.ParquetFile(parts[0].file).metadata.num_rows, 'row')}"
    return f"{many}{parts[0].name}: {parts[0].file.suffix[1:]}, {counted(size, 'byte')}{rows}"


def _columns(found: Findings) -> list[tuple[str, str]]:
    lines = []
    for place, (name, kinds) in enumerate(list(found.columns.items())[:30]):
        told = ", ".join(f"{kind} in {counted(count, 'row')}" for kind, count in kinds.most_common())
        told = next(iter(kinds)) if len(kinds) == 1 and kinds.total() == found.read else told
        missing = found.read - kinds.total()
        lines.append(
            ("columns" if not place else "", f"{name}: {told}" + (f", missing in {missing:,}" * bool(missing)))
        )
    return lines


def _outcome(found: Findings) -> list[tuple[str, str]]:
    layouts = ", ".join(
        f"{name} ({counted(count, 'row')})" for name, count in found.layouts.most_common() if name != "none"
    )
    bad = sum(count for count, _ in found.reasons.values()) + found.contradictory
    lines = [
        ("layout", layouts or f"none that is known ({', '.join(NAMES)})"),
        ("would take", f"{counted(found.good, 'row')}" + (f", {found.images:,} with images" if found.images else "")),
        ("would leave out", f"{found.repeated:,} repeated, {bad:,} bad"),
    ]
    if found.example is not None:
        prompt = found.example.messages[-1]["content"]
        shown = json.dumps(prompt[:_SHOWN] + "..." * (len(prompt) > _SHOWN), ensure_ascii=False)
        lines.append(("first prompt", shown))
        lines.append(("its answer", found.example.answer[:_SHOWN]))
        if found.example.tags:
            lines.append(("its tags", ", ".join(found.example.tags)[:_SHOWN]))
    return lines


def _advice(found: Findings, named: bool) -> list[tuple[str, str]]:
    """`named`: rows with their file."""
    advice = []
    for count, first in sorted(found.reasons.values(), key=lambda one: -one[0])[:10]:
        where = f"{first.source} row" if named else "row"
        advice.append(f"{counted(count, 'row')}: {first.reason} ({where} {first.row}: {first.content[:60]!r})")
    if len(found.reasons) > 10:
        advice.append(f"{len(found.reasons) - 10} more kinds of bad rows: see quarantine.parquet after `data prepare`")
    if found.contradictory:
        advice.append(f"{counted(found.contradictory, 'row')} with an earlier prompt and another answer")
    for name, kinds in found.columns.items():
        mixed = [kind for kind in kinds if kind != "empty"]
        if len(mixed) > 1:
            advice.append(f"column {name} mixes {' and '.join(mixed)}: write one kind")
    if found.read == 0:
        advice.append("there are no rows in it")
    if found.images:
        advice.append("there are images: model.path has to name a model that reads them")
    if found.good:
        advice.append(f"reward.name has to fit the answers: {_verifiers(found)}")
    return [("to do" if not place else "", text) for place, text in enumerate(advice)]


def _verifiers(found: Findings) -> str:
    """What the sources' own recipes use."""
    known = {"math_dapo": "dapo_math", "aime": "dapo_math", "geometry3k": "geo3k", "gsm8k": "math", "math": "math"}
    for origin, _ in found.origins.most_common(1):
        for part, name in known.items():
            if part in origin.casefold():
                return f"{name} for data_source {origin}"
    answer = json.loads(found.example.answer) if found.example else None
    if isinstance(answer, dict | list):
        return "json_call for tool calls, or a function of your own (docs/rewards.md)"
    if isinstance(answer, str) and re.fullmatch(r"[A-Ja-j]", answer.strip()):
        return "choice"
    if re.fullmatch(r"-?[\d.,/]+|\\.*|.*\$.*", str(answer)):
        return "math"
    return "exact for fixed words, math for formulas, or a function of your own (docs/rewards.md)"
