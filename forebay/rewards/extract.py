r"""The one place that finds the final answer in a response; evaluation and verifiers share it.

Invariants:
- What a response says while thinking is no answer: only what follows the last `</think>` counts, and of that only what
  comes before a `<think>` that opens again.
- The answer is the last `\boxed{...}`, its braces matched; without any box, the last `Answer: ...` line; without that,
  a number that ends the response. The rule that fired is told.
- A last box that is empty or never closed is an unfinished answer: no other rule fires instead.
- Time is linear in the response's length.
"""

import re
from dataclasses import dataclass
from typing import Literal

LONGEST = 200
"""Characters of an answer; a longer one is none."""

Rule = Literal["boxed", "answer_line", "trailing_number", "none"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LINE = re.compile(r"answer\W{0,4}:[ \t]*(\S.*)$", re.IGNORECASE | re.MULTILINE)
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_END = r"[\s.!*_$)\]`]*\Z"
_LAST_NUMBER = re.compile(rf"(?<![\w.,/^])([-+\u2212\u2013]?\$?{_DIGITS}(?:/[0-9]+)?){_END}")
_LAST_QUANTITY = re.compile(
    rf"(?<![\w.,/^])([-+\u2212\u2013]?{_DIGITS}(?:[eE][-+]?[0-9]+)?"
    rf"[ \u00a0\u202f]?(?:[A-Za-zµμ°Ω%][A-Za-z0-9µμΩ/²³]*)?){_END}"
)
_DECORATION = "*_` \t\r\n"


@dataclass(frozen=True, slots=True)
class Found:
    """The final answer of a response. Without one, `text` is empty and `problem` says why."""

    text: str
    rule: Rule
    problem: str = ""


def visible(response: str) -> str:
    """The response without its thinking."""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def boxed(response: str) -> Found:
    """By the first rule only."""
    text = visible(response)
    ends = [box.end() for box in _BOX.finditer(text)]
    if not ends:
        return Found("", "none", r"no \boxed{}")
    content = closed(text, ends[-1])
    return Found("", "boxed", "the last box is never closed") if content is None else _checked(content, "boxed")


def final_answer(response: str, *, unit: bool = False) -> Found:
    """By the first rule that fires. `unit`: a number that ends the response may have a unit behind it."""
    box = boxed(response)
    if box.rule == "boxed":
        return box
    text = visible(response)
    lines = _LINE.findall(text)
    if lines:
        return _checked(lines[-1], "answer_line")
    last = (_LAST_QUANTITY if unit else _LAST_NUMBER).search(text.rstrip()[-2 * LONGEST :])
    if last:
        return _checked(last[1], "trailing_number")
    return Found("", "none", "no final answer" if text.strip() or not response else "nothing after the thinking")


def closed(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes it; None if none does. Escaped braces (`\\{`) do not count."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None


def _checked(text: str, rule: Rule) -> Found:
    text = text.strip(_DECORATION).rstrip("." + _DECORATION)
    if not text:
        return Found("", rule, "the answer is empty")
    if len(text) > LONGEST:
        return Found("", rule, f"the answer has {len(text)} characters, more than {LONGEST}")
    return Found(text, rule)
