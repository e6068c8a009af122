"""Reward of the built-in maze task: 1.0 for a legal walk from start to goal, else 0.0."""

from typing import Any

from forebay.data.maze import score_walk


def score(response: str, answer: Any, prompt: str) -> float:
    """The prompt describes the maze in full; `answer` is not needed. Raises `ValueError` if the prompt is no maze."""
    return score_walk(prompt, response)
