"""What holds of the verifiers for any input."""

import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.rewards import load_verifier
from forebay.rewards.judgement import Judgement
from forebay.rewards.numbers import FACTORS, quantity

TRUTHS: dict[str, Any] = {
    "math": 7, "dapo_math": "7", "boxed": "7", "geo3k": "7", "exact": "7", "numeric": "7 ms", "choice": "B",
    "json_call": {"name": "on", "arguments": {"led": 1}}, "format": None,
}  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)


def judged(name: str, response: str, answer: Any, **options: Any) -> Judgement:
    return load_verifier(name, options).function(response, answer, "")


@pytest.mark.parametrize("name", TRUTHS)
@given(
    st.text(st.characters(codec="utf-8"), max_size=60),
    st.sampled_from(["{}", r"\boxed{{{}}}", "Answer: {}", "<think>{}"]),
)
def test_any_text_is_judged(name: str, text: str, around: str) -> None:
    judgement = judged(name, around.format(text), TRUTHS[name])
    assert judgement.verdict in ("right", "wrong")
    assert 0.0 <= (judgement.score or 0.0) <= 1.0


@given(
    ARGUMENTS, st.sampled_from(["{}", "I call\n```json\n{}\n```", "<tool_call>{}</tool_call>", "<think>hm</think>{}"])
)
def test_a_call_is_right_however_it_is_laid_out(arguments: dict[str, Any], around: str) -> None:
    shuffled = dict(random.Random(0).sample(sorted(arguments.items()), len(arguments)))
    text = json.dumps({"arguments": shuffled, "name": "f"}, indent=1)
    assume("think>" not in text)  # a tag in a string is a tag
    assert judged("json_call", around.format(text), {"name": "f", "arguments": arguments}).verdict == "right"


@given(ARGUMENTS, ARGUMENTS)
def test_other_arguments_are_wrong(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    same = _exact(given_) == _exact(expected)
    text = json.dumps({"name": "f", "arguments": given_})
    assert (judged("json_call", text, {"name": "f", "arguments": expected}).verdict == "right") is same


def _exact(value: Any) -> Any:
    """Equal if and only if the JSON values are, booleans told from numbers."""
    if isinstance(value, dict):
        return ("object", frozenset((key, _exact(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(map(_exact, value)))
    return ("truth" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "other", value)


@given(
    st.decimals(-(10**6), 10**6, places=3),
    st.decimals(0, 100, places=2),
    st.floats(-2.0, 2.0),
    st.sampled_from(list(FACTORS)),
)
def test_numbers_within_the_tolerance_and_no_others_are_right(
    value: Any, tolerance: Any, off: float, unit: str
) -> None:
    said = Fraction(value) + Fraction(f"{off:.3f}") * Fraction(tolerance)
    text = rf"\boxed{{{float(said):.5f} {unit}}}"
    answer = {"value": str(value), "unit": unit, "tolerance": float(tolerance)}
    exact = abs(Fraction(f"{float(said):.5f}") - Fraction(value)) <= Fraction(str(float(tolerance)))
    assert (judged("numeric", text, answer).verdict == "right") is exact


@given(st.integers(1, 10**9), st.sampled_from(sorted(FACTORS)), st.sampled_from(sorted(FACTORS)))
def test_units_of_one_kind_convert_and_no_others(number: int, one: str, other: str) -> None:
    (kind, factor), (other_kind, other_factor) = FACTORS[one], FACTORS[other]
    value = number * factor / other_factor
    answer = {
        "value": f"{value.numerator}/{value.denominator}" if value.denominator > 1 else value.numerator,
        "unit": other,
    }
    assert (judged("numeric", f"Answer: {number} {one}", answer).verdict == "right") is (kind == other_kind)


@given(st.fractions(-(10**6), 10**6, max_denominator=10**4))
def test_a_fraction_in_lowest_terms_is_read_exactly_and_no_other_is(value: Fraction) -> None:
    found = quantity(f"{value.numerator}/{value.denominator}")
    assert (found.value if found else None) == (value if value.denominator > 1 else None)
    assert quantity(f"{2 * value.numerator}/{2 * value.denominator}") is None
    assert math.isclose(quantity(f"{2 * value.numerator}/{2 * value.denominator}", reduced=False).value, value)  # type: ignore[union-attr]
