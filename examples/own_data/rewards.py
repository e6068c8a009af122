"""A reward of one's own: any function of (response, answer, prompt) that returns a number."""

from typing import Any

ENOUGH = 40
"""Characters; longer answers earn less."""


def short_and_right(response: str, answer: Any, prompt: str) -> float:
    """1.0 for a short answer that names the capital, less the longer it is, 0.0 without it."""
    if answer.lower() not in response.lower():
        return 0.0
    return min(1.0, ENOUGH / len(response))
