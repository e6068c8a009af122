r"""Reward for mathematics: 1.0 if the response's final answer equals the reference, else 0.0.

Invariants:
- The final answer is the last `\boxed{...}`; without any, the last `Answer: ...` line; without that, a number that
  ends the response. It has at most 200 characters.
- Against a plain number only a plain number counts (42, 1,000, -3.5, 3/4 in lowest terms, \frac{3}{4}): copying the
  question as `17+25` or `x=42` scores 0.
- A unit must be the same on both sides: `5 s` is neither `5 ms` nor `5`; `50%` is neither `50` nor `0.5`.
- Words are compared as text. Only formulas go to math-verify, which is slow at worst and so runs in the reward pool.

To have a reference like `x-1` or `3x` read as a formula, not as words or a number with a unit, write `$x-1$`, `$3x$`.
"""

import re
import threading
from fractions import Fraction
from math import gcd
from typing import Any

_LONGEST = 200
_SECONDS = 1
"""math-verify's own limit for one parse or comparison."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LINE = re.compile(r"answer\W{0,4}:[ \t]*(\S.*)$", re.IGNORECASE | re.MULTILINE)
_LAST_NUMBER = re.compile(r"(?<![\w.,/^])([-+]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?)[\s.!*_$)\]]*\Z")

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([-+]?)(?:([0-9]+)/([0-9]+)|\\[dt]?frac\{{([-+]?[0-9]+)\}}\{{([0-9]+)\}}|({_DECIMAL}))")
_UNIT = re.compile(r"\s*([A-Za-zµμ°Ω%][A-Za-zµμ°Ω%/^0-9 ]*)?")
_FORMULA = re.compile(r"[\\^_+*=(){}\[\]<>|]|[0-9][A-Za-z]")
_COSTLY = re.compile(r"\^\s*\{?[^{}^]*\^|!|\^\s*\{?\s*-?[0-9]{3}")
"""Towers of powers, factorials and three-digit powers: they only burn time."""


def score(response: str, answer: Any, prompt: str) -> float:
    """`answer` is text, a number, or {"answer": one of these}; raises `TypeError` otherwise."""
    if isinstance(answer, dict):
        answer = answer.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"reward math needs an answer that is text or a number, not {type(answer).__name__}")
    given = final_answer(response)
    return float(given is not None and equal(given, str(answer)))


def final_answer(response: str) -> str | None:
    """What the response gives as its answer, or None."""
    boxes = list(_BOX.finditer(response))
    lines = _LINE.findall(response)
    if boxes:
        found = _closed(response, boxes[-1].end())
    elif lines:
        found = lines[-1]
    else:
        last = _LAST_NUMBER.search(response.rstrip()[-2 * _LONGEST :])
        found = last[1] if last else None
    if found is None or len(found) > _LONGEST:
        return None
    return found.strip().strip("*").rstrip(".").strip() or None


def equal(given: str, reference: str) -> bool:
    """Whether two answers are the same; see the module's invariants."""
    one, other = _plain(given), _plain(reference)
    if one == other:
        return True
    formula = reference.strip().startswith("$")
    expected = _quantity(other)
    if expected is not None and not (formula and expected[1]):
        return _quantity(one) == expected
    if not formula and not _FORMULA.search(other):
        return False
    return not _COSTLY.search(one) and _verify(one, other)


def _closed(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes it; None if none does."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return None


def _plain(text: str) -> str:
    """Without what only formats: dollar signs, thin spaces, \\text{}, \\left, ..."""
    text = text.strip().replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\%", "%")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,!;: ]|\\?\$", "", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\\circ\})", "°", text)
    text = re.sub(r"\\([dt]?frac)([0-9])([0-9])(?![0-9])", r"\\\1{\2}{\3}", text)
    while text.startswith("{") and _closed(text, 1) == text[1:-1]:
        text = text[1:-1]
    return " ".join(text.split())


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """A plain number and its unit; None for anything else, fractions that can be reduced among it."""
    match = _NUMBER.match(text)
    unit = _UNIT.fullmatch(text, match.end()) if match else None
    if match is None or unit is None:
        return None
    sign, top, bottom, latex_top, latex_bottom, decimal = match.groups()
    if decimal is not None:
        value = Fraction(decimal.replace(",", ""))
    else:
        above, below = int(top or latex_top), int(bottom or latex_bottom)
        if below < 2 or gcd(above, below) > 1:
            return None
        value = Fraction(above, below)
    return (-value if sign == "-" else value), (unit[1] or "").strip()


def _verify(given: str, reference: str) -> bool:
    from math_verify import parse, verify

    # Its limits are alarm signals, which work in a process's main thread only: that is where the pool runs us.
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    expected = parse(f"${reference}$", parsing_timeout=seconds)
    found = parse(f"${given}$", parsing_timeout=seconds)
    return bool(expected and found) and bool(verify(expected, found, timeout_seconds=seconds))
