"""Verifier of the built-in maze task: a legal walk from start to goal."""

from typing import Any

from forebay.data.maze import score_walk
from forebay.rewards.judgement import Judgement, right, wrong


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """The prompt describes the maze in full; `answer` is not needed. Raises `ValueError` if the prompt is no maze."""
    return right("a legal walk") if score_walk(prompt, response) else wrong("no legal walk from start to goal")
