"""Verifier for measured quantities: a number within a tolerance, in the right unit.

Invariants:
- The reference says its unit and its tolerances; nothing is guessed. Without tolerances the numbers must be equal.
- Units of the same kind convert (5000 ms is 5 s, see `numbers.FACTORS`); others, decibels among them, must be the same.
- A missing unit is wrong unless `unit_required` is false; a wrong unit is always wrong.
"""

from fractions import Fraction
from typing import Any

from forebay.rewards.extract import final_answer
from forebay.rewards.judgement import Judgement, right, wrong
from forebay.rewards.numbers import Quantity, converted, plain, quantity, unit_name

_KEYS = {"value", "unit", "tolerance", "relative", "unit_required"}


def score(
    response: str,
    answer: Any,
    prompt: str,
    *,
    tolerance: float = 0.0,
    relative: float = 0.0,
    unit_required: bool = True,
) -> Judgement:
    """`answer`: a number, text such as "5 ms", or {"value": number or text, "unit", "tolerance", "relative",
    "unit_required"}, which wins over the options. `tolerance` is absolute, in the reference's unit; `relative` a share
    of the reference's value; an answer is right within the sum of both. Raises `TypeError` or `ValueError`."""
    options = {"tolerance": tolerance, "relative": relative, "unit_required": unit_required}
    spec = {**options, **(answer if isinstance(answer, dict) else {"value": answer})}
    expected = _reference(spec)
    found = final_answer(response, unit=True)
    if found.problem:
        return wrong(found.problem)
    given = quantity(plain(found.text))
    if given is None:
        return wrong(f"{found.text} is no plain number")
    if not given.unit and not spec["unit_required"]:
        given = Quantity(given.value, expected.unit)
    value = converted(given, expected.unit)
    if value is None:
        return wrong(f"{found.text} has unit {given.unit or 'none'}, not {expected.unit or 'none'}")
    allowed = Fraction(str(spec["tolerance"])) + Fraction(str(spec["relative"])) * abs(expected.value)
    off = abs(value - expected.value)
    words = f"{float(value):.12g} for {float(expected.value):.12g} {expected.unit}".strip()
    return right(words) if off <= allowed else wrong(f"{words}, more than {float(allowed):.6g} off")


def _reference(spec: dict[str, Any]) -> Quantity:
    unknown, value = set(spec) - _KEYS, spec.get("value")
    if unknown:
        raise ValueError(f"reward numeric knows {', '.join(sorted(_KEYS))}, not {', '.join(sorted(unknown))}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"reward numeric needs a number or text such as '5 ms', not {type(value).__name__}")
    expected = quantity(plain(str(value)), reduced=False)
    if expected is None:
        raise ValueError(f"reward numeric: the reference {value!r} is no plain number with a unit")
    if "unit" in spec:
        if expected.unit:
            raise ValueError(f"reward numeric: the reference has its unit twice ({value!r} and unit {spec['unit']!r})")
        expected = Quantity(expected.value, unit_name(str(spec["unit"])))
    return expected
