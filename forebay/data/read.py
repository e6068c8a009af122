"""Checking of the user's rows, one by one: a record becomes a `Draft`, or a `BadRow` with the reason.

Invariants:
- Every row that is read is either a `Draft` or a `BadRow`; none disappears.
- A row is bad for its own sake only, never because of other rows (repeated prompts are found later:
  `forebay.data.dataset`).
"""

import fnmatch
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from forebay.config import DataConfig, ImagesConfig, RunConfig
from forebay.data.counted import counted
from forebay.data.images import MARK, image_source
from forebay.data.layouts import final_answer, layout_of, tags_of, value_at
from forebay.data.schema import BadRow, Draft, Message
from forebay.data.sources import SUFFIXES, Record, Unreadable, parts_of
from forebay.errors import DataError

_SHOWN = 300
_ROLES = ("system", "user", "assistant")


class Keeper(Protocol):
    """Where images go (`forebay.data.images.Pictures`)."""

    def keep(self, source: Any, config: ImagesConfig) -> str:
        """The image's name; raises `DataError` if it is broken."""


def read_source(data: DataConfig, pictures: Keeper | None = None) -> Iterator[tuple[int, Draft | BadRow]]:
    """Numbered rows of a source that is not on S3, repeated ones too. Raises `UserError` if it cannot be read."""
    for part in parts_of(data.source, data.hub_split, RunConfig(), Path()):
        for block in part.blocks():
            for number, record in block.records():
                yield number, checked(number, record, part.name, data, pictures)


def checked(number: int, record: Record, part: str, data: DataConfig, pictures: Keeper | None) -> Draft | BadRow:
    """One row. `pictures`: None if the model reads no images."""
    try:
        return draft_of(record, part, data, pictures)
    except DataError as error:
        return bad_row(number, part, str(error), record.content if isinstance(record, Unreadable) else record)


def bad_row(number: int, source: str, reason: str, content: Any) -> BadRow:
    """`content` is cut, and written as JSON where possible."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=_short)
    return BadRow(number, source, reason, text[:_SHOWN].encode(errors="replace").decode())


def _short(value: Any) -> str:
    return str(value[:20] if isinstance(value, bytes) else value)


def draft_of(record: Record, part: str, data: DataConfig, pictures: Keeper | None = None) -> Draft:
    """Check one record; raises `DataError` with the reason."""
    if isinstance(record, Unreadable):
        raise DataError(record.reason)
    layout = layout_of(record, data.columns)
    messages = _messages(value_at(record, layout.prompt, "prompt"), data.instruction)
    answer = _answer(final_answer(value_at(record, layout.answer, "answer"), layout.form))
    images = _images(record.get(data.columns.images), messages, part, data, pictures)
    tags = tuple(dict.fromkeys(tags_of(record, data.columns.tags)))
    return Draft(messages, answer, part, _verifier(record, data), images, tags=tags)


def _images(
    value: Any, messages: tuple[Message, ...], part: str, data: DataConfig, pictures: Keeper | None
) -> tuple[str, ...]:
    """Kept; one for each mark in the text, if there are marks."""
    items = [] if value is None or value == "" else value if isinstance(value, list) else [value]
    if not items:
        return ()
    if pictures is None:
        raise DataError(f"the prompt has {counted(len(items), 'image')}, but the model of model.path reads none")
    if len(items) > data.images.max_per_prompt:
        raise DataError(f"{len(items)} images; data.images.max_per_prompt is {data.images.max_per_prompt}")
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks not in (0, len(items)):
        raise DataError(f"{counted(len(items), 'image')}, but {MARK} stands {counted(marks, 'time')} in the prompt")
    local = part.endswith(SUFFIXES) and not part.startswith("s3://")
    folder = Path(data.images.folder) if data.images.folder else Path(part).parent if local else None
    return tuple(pictures.keep(image_source(item, folder), data.images) for item in items)


def _messages(value: Any, instruction: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise DataError(f"the prompt is {_kind(value)}, not text or a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(value, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise DataError(f"message {number} of the prompt is not {{role: {' | '.join(_ROLES)}, content: text}}")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise DataError(f"message {number} of the prompt is not valid Unicode (save the file as UTF-8)") from None
        messages.append({"role": role, "content": content})
    if not messages or not messages[-1]["content"].strip():
        raise DataError("the prompt is empty")
    if messages[-1]["role"] != "user":
        raise DataError(f"the prompt ends with a message of role {messages[-1]['role']}, not user")
    if instruction:
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n\n{instruction}"}
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
    if value or not data.verifiers:
        return value or ""
    origin = str(record.get("data_source"))
    return next((name for like, name in data.verifiers.items() if fnmatch.fnmatchcase(origin, like)), "")


def _kind(value: Any) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"
