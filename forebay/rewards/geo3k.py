"""Verifier of Geometry3k's recipe: 0.9 for the boxed answer, 0.1 for the format (verl's `geo3k.compute_score`)."""

from typing import Any

from forebay.rewards import boxed
from forebay.rewards import format as layout
from forebay.rewards.judgement import Judgement

ANSWER, FORMAT = 0.9, 0.1
"""Weights. The answer alone decides the verdict `right`; the format alone is `wrong`."""


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """`answer` as for `math`."""
    result, form = boxed.score(response, answer, prompt), layout.score(response, answer, prompt)
    if result.score is None:
        return result
    total = ANSWER * result.score + FORMAT * (form.score or 0.0)
    return Judgement(total, result.verdict, f"{result.reason}; format {form.verdict}: {form.reason}")
