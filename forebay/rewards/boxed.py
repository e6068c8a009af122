r"""Verifier for answers that must be in a box: the last `\boxed{...}` equals the reference, as `math` compares."""

from typing import Any

from forebay.rewards import extract, math
from forebay.rewards.judgement import Judgement


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """`answer` as for `math`."""
    return math.judge(extract.boxed(response), answer, "boxed")
