"""Verifier for answers that are one certain text."""

from typing import Any

from forebay.rewards.extract import visible
from forebay.rewards.judgement import Judgement, right, wrong


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """Right if the response, without its thinking, is the answer (text, number or boolean), white space at the ends
    and runs of it aside. Raises `TypeError` for another kind of answer."""
    if not isinstance(answer, str | int | float):
        raise TypeError(f"reward exact needs an answer that is text or a number, not {type(answer).__name__}")
    given = visible(response).split()
    return right("the same text") if given == str(answer).split() else wrong("another text")
