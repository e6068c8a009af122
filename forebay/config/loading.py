"""Profiles: YAML files, layered with `--set key=value`, checked by pydantic.

A profile that is wrong raises `UserError` with one line per mistake: file, key, what is wrong, what to do.
"""

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from forebay.config.run import RunConfig
from forebay.errors import UserError

BAD_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""A date that is none, a number of thousands of digits, thousands of brackets: PyYAML lets Python's own errors out."""


_OF_A_TYPE = re.compile(r"function-|constrained-|literal\[|(int|float|str|bool|tuple|list|dict)(\[|$)")
"""Parts of a mistake's place that are no keys, but the type that was tried."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which takes the last of two equal keys, made to refuse the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            line = key_node.start_mark.line + 1
            try:
                hash(key)
            except TypeError:
                raise yaml.constructor.ConstructorError(None, None, f"line {line}: {key!r} is no key") from None
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"line {line}: key {key!r} stands here a second time"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_profile(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a profile (None: an empty one) and apply `key.sub=value` overrides (values are YAML); raises `UserError`."""
    values = {} if path is None else _read_yaml(Path(path))
    for text in overrides:
        _assign(values, text)
    return parse_config(values, where=str(path or "--set"))


def parse_config(values: Mapping[str, Any], where: str) -> RunConfig:
    """Validate a mapping; `where` names its origin in messages."""
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        lines = [f"{where}: {_explain(item)}" for item in _one_a_key(error.errors())]
        raise UserError("\n".join(lines)) from None


def _one_a_key(items: Sequence[Any]) -> list[Any]:
    """One mistake for each key: pydantic tells one for every type that a key may have."""
    found: dict[tuple[Any, ...], Any] = {}
    for item in items:
        location = tuple(part for part in item["loc"] if not (isinstance(part, str) and _OF_A_TYPE.match(part)))
        if location in found:
            message = str(item["msg"])
            found[location] |= {"msg": f"{found[location]['msg']}; or {message[0].lower()}{message[1:]}"}
        else:
            found[location] = {**item, "loc": location}
    return list(found.values())


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(p) for p in Path("profiles").glob("*.yaml"))
        hint = f"; there are {', '.join(near)}" if near else ""
        raise UserError(f"{path}: no such profile{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a profile ({error})") from None
    try:
        values = yaml.load(text, _Loader)
    except BAD_YAML as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: a profile is a mapping of keys, not a {type(values).__name__}")
    return values


def _assign(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {text}: write key=value, for example --set training.steps=20")
    try:
        value = yaml.load(raw, _Loader)
    except BAD_YAML:
        raise UserError(f"--set {text[:80]}: the value is not valid YAML; quote it") from None
    node = values
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:  # absent, or a section without keys
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"--set {text}: {part} is a value, not a section")
        node = child
    node[parts[-1]] = value


def _explain(item: Any) -> str:
    location = item["loc"]
    key = ".".join(str(part) for part in location)
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        names = _fields_at(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), names, n=1)
        message = "unknown key" + (f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(names)}")
        return f"{key}: {message}"
    if not key:
        return message
    if item["type"] == "model_type":
        return f"{key}: is a section: write keys under it, or leave it out (got {_shown(item['input'])})"
    return f"{key}: {message[0].lower()}{message[1:]} (got {_shown(item['input'])})"


def _shown(value: Any) -> str:
    """Short, and without the credentials of a URI."""
    text = re.sub(r"(?<!file)(://)[^@\s]+@", r"\1***@", repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fields_at(location: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        field = model.model_fields.get(str(part))
        kinds: list[Any] = [] if field is None else [field.annotation, *get_args(field.annotation)]  # a section or null
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return sorted(model.model_fields)
