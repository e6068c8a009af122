"""Rewards for models that know nothing: something differs between any two responses."""

from typing import Any


def letters(response: str, answer: Any, prompt: str) -> float:
    """Share of the characters that are small Latin letters."""
    return sum("a" <= c <= "z" for c in response) / max(len(response), 1)
