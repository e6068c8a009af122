"""Reward for answers that are one certain text."""

from typing import Any


def score(response: str, answer: Any, prompt: str) -> float:
    """1.0 if the response is the answer (text, number or boolean), white space at the ends and runs of it aside."""
    if not isinstance(answer, str | int | float):
        raise TypeError(f"reward exact needs an answer that is text or a number, not {type(answer).__name__}")
    return float(response.split() == str(answer).split())
