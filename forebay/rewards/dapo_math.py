r"""Verifier as in DAPO: the last `Answer:` line of the last 300 characters, normalised, is the reference's text.

Own writing of what verl's `math_dapo.compute_score` does (Apache-2.0, after EleutherAI's Minerva evaluation; Lewkowycz
et al. 2022, appendix D.1). docs/rewards.md lists the differences.

Invariants:
- Text against text: no mathematics, so `34.0` and `1/2` for `0.5` are wrong. Common units are taken off, not compared.
- Looks at 300 characters, thinking included: it works in constant time.
"""

import re
from typing import Any

from forebay.rewards.judgement import Judgement, right
from forebay.rewards.math import reference_text

LOOKED_AT = 300
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples",
)  # fmt: skip
_DROPPED = (
    "an ", "a ", r"\$", r"\ ", " ", r"\text{m}", r"\text{s}", r"\text{.}", r"\text{}^2", r"\text{}^3", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\ldots", r"\dots", *_UNITS,
)  # fmt: skip
_WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")


def score(response: str, answer: Any, prompt: str, *, wrong: float = 0.0) -> Judgement:
    """1.0 or `wrong` (DAPO's paper: -1.0). `answer` is text, a number, or {"answer": one of these}."""
    reference = normalised(reference_text(answer, "dapo_math"))
    lines = _LINE.findall(response[-LOOKED_AT:])
    if not lines:
        return Judgement(wrong, "wrong", f"no Answer: line in the last {LOOKED_AT} characters")
    given = normalised(lines[-1].strip().strip("*"))
    if given == reference:
        return right(f"{given}, as the reference")
    return Judgement(wrong, "wrong", f"{given} is not {reference}")


def normalised(text: str) -> str:
    """What is left of an answer: after the last `=`, without articles, units, spaces and wrappings, with
    full-length fractions and roots, and without the commas of a number."""
    text = text.rpartition("=")[2].replace(".$", "$").replace("mbox", "text")
    for dropped in _DROPPED[:5]:
        text = text.replace(dropped, "")
    text = text.replace(r",\text{and}", ",").replace(r"\text{and}", ",")
    for dropped in _DROPPED[5:]:
        text = text.replace(dropped, "")
    between = re.search(r"\$(.*?)\$", text)
    text = between[1] if between else text
    text = _WRAPPED.sub(r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
