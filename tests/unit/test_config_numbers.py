"""No number of any section may be given as true or false."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from forebay.config import RunConfig, parse_config
from forebay.errors import UserError


def plain(annotation: Any) -> set[Any]:
    return {annotation}.union(*(plain(part) for part in get_args(annotation)))


def numbers(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[Any]]]:
    """(path, types in its annotation) of every field that takes a number, in all sections."""
    for name, field in model.model_fields.items():
        kinds = plain(field.annotation)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, (*path, name))
        if kinds & {int, float}:
            yield (*path, name), kinds


FIELDS = dict(numbers(RunConfig))


def test_the_walk_finds_the_fields_of_all_sections() -> None:
    assert len(FIELDS) > 100
    assert {("seed",), ("training", "steps"), ("control", "queue", "high"), ("data", "maze", "sizes")} <= set(FIELDS)


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_numbers(path: tuple[str, ...], value: bool) -> None:
    given: Any = {3: value} if dict in {getattr(kind, "__origin__", None) for kind in FIELDS[path]} else value
    values: Any = given
    for part in reversed(path):
        values = {part: values}
    with pytest.raises(UserError, match=rf"{'.'.join(path)}: a number is needed, not true or false \(got "):
        parse_config(values, "test")


def test_numbers_and_switches_are_taken_as_before() -> None:
    values = {"training": {"steps": 1}, "control": {"max_staleness": 0, "dynamic_sampling": True}, "seed": 1}
    config = parse_config(values | {"data": {"maze": {"sizes": {3: 1}}}}, "test")
    assert (config.training.steps, config.control.max_staleness, config.seed) == (1, 0.0, 1)
    assert config.control.dynamic_sampling is True
