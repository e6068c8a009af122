"""Layouts of other people's data sets, recognised by their columns.

Invariants:
- A row's layout depends on the names of its columns and on the profile only, not on other rows.
- What the profile names (`data.columns`) comes before what is recognised.
- Names are compared without letter case (`Problem`, `Answer` in copies of AIME).

| layout | columns | answer |
| --- | --- | --- |
| verl | prompt, reward_model | reward_model.ground_truth |
| slime, vime, miles | prompt, label | label |
| TRL, plain | prompt, answer | answer |
| TRL | prompt, solution | solution: its last box, or all of it |
| GSM8K | question, answer | answer: what follows `####`, or all of it |
| AIME, Geometry3k | problem, answer | answer |
| MATH | problem, solution | solution: its last box |
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from forebay.config.data import ColumnsConfig
from forebay.errors import DataError
from forebay.rewards.extract import boxed

Form = Literal["whole", "hashes", "hashes_or_whole", "boxed", "boxed_or_whole"]
TAGS = frozenset({"data_source", "ability", "level", "type", "subject", "difficulty", "category", "topic", "year"})
"""Columns whose values become tags in every layout."""
_TAG = 80
"""Characters of a tag."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the prompt and the answer are."""

    name: str
    prompt: str
    """Column; a dot goes into an object."""
    answer: str
    form: Form = "whole"


_KNOWN = (
    Layout("verl", "prompt", "reward_model.ground_truth"),
    Layout("slime / vime / miles", "prompt", "label"),
    Layout("plain (TRL)", "prompt", "answer"),
    Layout("TRL", "prompt", "solution", "boxed_or_whole"),
    Layout("GSM8K", "question", "answer", "hashes_or_whole"),
    Layout("problem and answer (AIME, Geometry3k)", "problem", "answer"),
    Layout("MATH", "problem", "solution", "boxed"),
)
PLAIN = _KNOWN[2]
NAMES = tuple(layout.name for layout in _KNOWN)


@functools.lru_cache(maxsize=1000)
def _recognised(columns: tuple[str, ...]) -> Layout | None:
    there = {name.casefold(): name for name in reversed(columns)}
    for layout in _KNOWN:
        names = [path.partition(".") for path in (layout.prompt, layout.answer)]
        if all(head in there for head, _, _ in names):
            prompt, answer = (there[head] + dot + rest for head, dot, rest in names)
            return replace(layout, prompt=prompt, answer=answer)
    return None


def layout_of(record: Mapping[str, Any], columns: ColumnsConfig) -> Layout:
    """The layout of one row; raises `DataError` if a column that it needs is missing."""
    names = tuple(record)
    layout = _recognised(names) or PLAIN
    form: Form = layout.form if columns.answer is None else "whole"
    layout = Layout(
        "mapped in the profile" if columns.prompt or columns.answer else layout.name,
        columns.prompt or layout.prompt,
        columns.answer or layout.answer,
        form if columns.answer_form == "auto" else columns.answer_form,
    )
    for field, path in (("prompt", layout.prompt), ("answer", layout.answer)):
        if path not in record and path.partition(".")[0] not in record:
            there = ", ".join(map(str, names)) or "none"
            raise DataError(f"no column {path!r} (columns here: {there[:200]}; set data.columns.{field})")
    return layout


def value_at(record: Mapping[str, Any], path: str, field: str) -> Any:
    """The value of a column, dots going into objects; raises `DataError` if there is none."""
    if path in record:
        return record[path]
    head, _, rest = path.partition(".")
    inner = record.get(head)
    if not rest:
        return inner
    if not isinstance(inner, Mapping) or rest.partition(".")[0] not in inner:
        raise DataError(f"no {rest!r} in column {head!r} (set data.columns.{field})")
    return value_at(inner, rest, field)


def final_answer(value: Any, form: Form) -> Any:
    """The answer out of a worked solution, as text; raises `DataError` if it is not there."""
    if form == "whole" or not isinstance(value, str):
        return value
    if form.startswith("hashes"):
        _, marks, rest = value.rpartition("####")
        if marks:
            return rest.strip().replace(",", "")
        if form == "hashes":
            raise DataError("the answer has no ####, after which it should stand")
        return value
    box = boxed(value)
    if box.text or (box.rule == "none" and form == "boxed_or_whole"):
        return box.text or value
    raise DataError(f"the solution does not end in a \\boxed{{}} with the answer ({box.problem})")


def tags_of(record: Mapping[str, Any], more: list[str]) -> list[str]:
    """`column:value` for each column of `TAGS` and `more`, and what the row itself holds as `tags` or `metadata`."""
    tags: list[str] = []
    for name in record:
        if name in TAGS or name in more:
            _add(tags, name, record[name])
    own, metadata = record.get("tags"), record.get("metadata")
    if isinstance(own, list):
        tags += [tag[:_TAG] for tag in own if isinstance(tag, str)]
    if isinstance(metadata, Mapping):
        for name, value in metadata.items():
            _add(tags, name, value)
    return tags


def _add(tags: list[str], name: str, value: Any) -> None:
    if isinstance(value, str | int) and value != "":
        tags.append(f"{name}:{value}"[:_TAG])
