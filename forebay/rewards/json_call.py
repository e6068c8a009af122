r"""Verifier for tool calls: the JSON objects of a response are the expected calls.

Invariants:
- A call is {"name": ..., "arguments": {...}}. Name, arguments, their values and types must be equal; the order of keys
  and white space do not matter, nor 1 against 1.0, but true is not 1. `arguments` may be JSON in a string.
- All calls of the response count, in order: one too many is wrong. Thinking does not count; fences, tags and text
  around the calls do not matter.
- Keys that are there twice, NaN and Infinity are no JSON. At most `TRIES` beginnings are looked at.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from forebay.rewards.extract import visible
from forebay.rewards.judgement import Judgement, right, wrong

TRIES = 64
LONGEST = 20_000
"""Characters of a response, from its end, that are looked at."""


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """`answer`: one call or a list of calls, in order. Raises `TypeError` for anything else."""
    expected = answer if isinstance(answer, list) else [answer]
    if not expected or not all(isinstance(call, dict) and "name" in call for call in expected):
        raise TypeError("reward json_call needs {name, arguments} or a list of these")
    found = [value for value in objects(visible(response)[-LONGEST:]) if "name" in value]
    if not found:
        return wrong("no JSON object with a name")
    if len(found) != len(expected):
        return wrong(f"{len(found)} calls, not {len(expected)}")
    for number, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        difference = _difference(_call(one), _call(other))
        if difference:
            return wrong(f"call {number}: {difference}")
    return right(f"{', '.join(str(call['name']) for call in expected)} with the right arguments")


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects of a text, in order; a list's members one by one."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused)
    at = text.find("{")
    for _ in range(TRIES):
        if at < 0:
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)


def _call(value: dict[str, Any]) -> dict[str, Any]:
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, object_pairs_hook=_unique, parse_constant=_refused)
    rest = {key: item for key, item in value.items() if key not in ("arguments", "parameters", "id", "type")}
    return {**rest, "arguments": arguments}


def _difference(one: Any, other: Any, where: str = "") -> str:
    """Where and how two JSON values differ; empty if they do not."""
    numbers = (int, float)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*other, *(key for key in one if key not in other)]:
            path = f"{where}.{key}" if where else str(key)
            if key not in one or key not in other:
                return f"{path} is {'missing' if key not in one else 'not asked for'}"
            if difference := _difference(one[key], other[key], path):
                return difference
        return ""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next(filter(None, parts), "")
    alike = type(one) is type(other) or (isinstance(one, numbers) and isinstance(other, numbers))
    if alike and isinstance(one, bool) == isinstance(other, bool) and one == other:
        return ""
    return f"{where} is {json.dumps(one)[:60]}, not {json.dumps(other)[:60]}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
