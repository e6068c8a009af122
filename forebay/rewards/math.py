r"""Verifier for mathematics: the response's final answer equals the reference. math-verify, hardened.

Invariants:
- Against a plain number only a plain number counts (see `numbers`): copying the question as `17+25` or `x=42` is
  wrong, and so is a fraction that can be reduced. Option `unevaluated` lets math-verify decide instead.
- A unit must be the same on both sides: `5 s` is neither `5 ms` nor `5`; `50%` is neither `50` nor `0.5`.
- Words are compared as text. Only formulas go to math-verify: never what would burn time (towers of powers, factorials,
  deep nesting, sums and integrals to be worked out), and under a limit of `SECONDS`, past which it is `timed_out`.

To have a reference like `x-1` or `3x` read as a formula, not as words or a number with a unit, write `$x-1$`, `$3x$`.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from forebay.rewards.extract import LONGEST, Found, closed, final_answer
from forebay.rewards.judgement import Judgement, right, timed_out, wrong
from forebay.rewards.numbers import Quantity, plain, quantity

SECONDS = 1.0
"""Processor time for reading both sides and comparing them with math-verify; a busy machine takes none of it."""

_FORMULA = re.compile(r"[\\^_+*=(){}\[\]<>|]|[0-9]\s*(?:,|[A-Za-z])")
_TO_BE_WORKED_OUT = re.compile(r"\\(?:i*o?int|sum|prod|lim|binom|dbinom|tbinom|choose|det|gcd|Gamma)(?![A-Za-z])")
_BRACKET_POWER = re.compile(r"[)\]}]\s*\^\s*\{?\s*-?\s*([0-9]+)")
_DEEPEST = 8
_LARGEST_POWER = 100
"""Product of the exponents of brackets; products of the numbers within one exponent may reach ten times that."""


def score(response: str, answer: Any, prompt: str, *, unevaluated: bool = False) -> Judgement:
    """`answer` is text, a number, or {"answer": one of these}; raises `TypeError` otherwise."""
    return judge(final_answer(response), answer, "math", unevaluated=unevaluated)


def judge(found: Found, answer: Any, name: str, *, unevaluated: bool = False) -> Judgement:
    """The comparison that `math`, `boxed` and `geo3k` share."""
    reference = reference_text(answer, name)
    if found.problem:
        return wrong(found.problem)
    return compare(found.text, reference, unevaluated=unevaluated)


def reference_text(answer: Any, name: str) -> str:
    """The reference of a row whose answer is text, a number, or {"answer": ...}; raises `TypeError`."""
    if isinstance(answer, dict):
        answer = answer.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"reward {name} needs an answer that is text or a number, not {type(answer).__name__}")
    return str(answer)


def equal(given: str, reference: str) -> bool:
    """Whether two answers are the same; see the module's invariants."""
    return compare(given, reference).verdict == "right"


def compare(given: str, reference: str, *, unevaluated: bool = False) -> Judgement:
    """Right, wrong or timed out, with the reason."""
    one, other = plain(given), plain(reference)
    if one == other:
        return right(f"{one}, as the reference")
    if len(other) > LONGEST or not one:
        return wrong(f"{one} is not the reference")
    formula = reference.strip().startswith("$")
    expected = quantity(other, reduced=False)
    if expected is not None and not (formula and expected.unit):
        return _as_number(one, expected, other, unevaluated)
    if not formula and not _FORMULA.search(other):
        return wrong(f"{one} is not {other}")
    return _as_formula(one, other)


def _as_number(one: str, expected: Quantity, other: str, unevaluated: bool) -> Judgement:
    found = quantity(one)
    if found is None or (found.power_of_ten and not expected.power_of_ten):
        if unevaluated:
            return _as_formula(one, other)
        return wrong(f"{one} is no plain number, as {other} is")
    if found.unit != expected.unit:
        return wrong(f"{one} has unit {found.unit or 'none'}, {other} has {expected.unit or 'none'}")
    return right(f"{one} is {other}") if found.value == expected.value else wrong(f"{one} is not {other}")


def _as_formula(one: str, other: str) -> Judgement:
    for text in (one, other):
        if costly(text):
            return wrong(f"{text} is not compared: it would take too long")
    if any(operator not in other for operator in _TO_BE_WORKED_OUT.findall(one)):
        return wrong(f"{one} is not worked out")
    import math_verify  # noqa: F401 - now, so that its import does not count as time

    try:
        with _limited(SECONDS):
            same = _verify(one, other)
    except _TooLongError:
        return timed_out(f"math-verify took longer than {SECONDS:g} s for {one} and {other}")
    return right(f"{one} equals {other}") if same else wrong(f"{one} is not {other}")


def costly(formula: str) -> bool:
    """Whether working with it may burn time: what it would take is bounded by the exponents and by the depth."""
    if "!" in formula or formula.count("\\exp") > 1 or _depth(formula) > _DEEPEST:
        return True
    if prod(int(power) for power in _BRACKET_POWER.findall(formula)) > _LARGEST_POWER:
        return True
    for exponent, after in _exponents(formula):
        numbers = [int(number) for number in re.findall("[0-9]+", exponent)]
        tower = "^" in exponent or after.startswith("^")
        if tower or prod(numbers) >= 10 * _LARGEST_POWER or any(number >= _LARGEST_POWER for number in numbers):
            return True
    return False


def _exponents(formula: str) -> Iterator[tuple[str, str]]:
    """Each exponent with what follows it."""
    for sign in re.finditer(r"\^\s*", formula):
        rest = formula[sign.end() :]
        inside = closed(rest, 1) if rest.startswith("{") else None
        if inside is not None:
            yield inside, rest[len(inside) + 2 :].lstrip("} ")
        else:
            number = re.match(r"-?[0-9]+|", rest)
            yield (number[0], rest[len(number[0]) :].lstrip("} ")) if number else ("", rest)


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "{([") - (letter in "})]")
        deepest = max(deepest, depth)
    return deepest


def _verify(given: str, reference: str) -> bool:
    from math_verify import parse, verify

    # Its own limits say False when they pass; ours is told apart. It would warn once that it has none.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = parse(f"${reference}$", parsing_timeout=None)
    found = parse(f"${given}$", parsing_timeout=None)
    # What it cannot read it compares as text, which we have done.
    return bool(expected and found) and bool(verify(expected, found, timeout_seconds=None))


AGAIN_S = 0.05
"""CPU seconds after which a limit that was not heard is told again."""


class _TooLongError(BaseException):
    """Not an `Exception`: math-verify and sympy catch those."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooLongError` in the block when the time is over. Only in a process's main thread, where the pool runs
    us; what C code does without looking at signals is the pool's to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGPROF, late)
    # Again and again: raised within a destructor or a hook of the garbage collector it would be ignored.
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
