"""The built-in tasks that a tiny start model is made for: its words, and what its warm start learns from.

Invariants:
- A demonstration is worked right or, with the task's chance `impatient`, with a habit that is mostly wrong.
- Prompts and demonstrations consist of `words` only, so each is a few tokens long.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from forebay.config import DataConfig
from forebay.data import cycle
from forebay.data.builtin import BUILT_IN, CYCLE, MAZE, TELECOM
from forebay.data.maze import draw_demonstration, draw_maze, vocabulary, write_prompt
from forebay.data.telecom import EASY_WORDS
from forebay.errors import UserError

_ANSWER = "\nAnswer: "


@dataclass(frozen=True, slots=True)
class TinyTask:
    """What one tiny start model needs."""

    name: str
    """Of the task, and of its settings in `data`."""
    source: str
    words: Callable[[DataConfig], list[str]]
    demonstrate: Callable[[random.Random, DataConfig], tuple[str, str]]
    """Draws (prompt, response)."""

    def check(self, data: DataConfig) -> None:
        """Raises `UserError` if the model would not know the words of these data."""
        model = f"builtin:{self.name}-tiny"
        if data.source != self.source:
            raise UserError(
                f"model.path {model} reads only data.source {self.source}; for other data set another model.path"
            )
        if self.source == TELECOM and not (
            set(data.telecom.families) <= set(EASY_WORDS) and set(data.telecom.difficulty) == {1}
        ):
            raise UserError(
                f"model.path {model} reads only the families {', '.join(EASY_WORDS)} at difficulty 1: set "
                "data.telecom.families and data.telecom.difficulty, or another model.path"
            )


def _maze_words(data: DataConfig) -> list[str]:
    return vocabulary(max(data.maze.sizes))


def _show_maze(rng: random.Random, data: DataConfig) -> tuple[str, str]:
    maze = draw_maze(rng, data.maze.sizes)
    return write_prompt(maze), draw_demonstration(maze, rng, data.maze.impatient)


def _cycle_words(data: DataConfig) -> list[str]:
    return [_ANSWER, *cycle.words((data.cycle.min_terms, data.cycle.max_terms), data.cycle.target)]


def _show_cycle(rng: random.Random, data: DataConfig) -> tuple[str, str]:
    question = BUILT_IN[CYCLE](rng, data)
    return question.prompt, question.demonstration(rng, data.cycle.impatient)


def _telecom_words(data: DataConfig) -> list[str]:
    return list(dict.fromkeys([_ANSWER, *(word for family in data.telecom.families for word in EASY_WORDS[family])]))


def _show_telecom(rng: random.Random, data: DataConfig) -> tuple[str, str]:
    question = BUILT_IN[TELECOM](rng, data)
    return question.prompt, question.demonstration(rng, data.telecom.impatient)


TINY_TASKS = {
    f"builtin:{task.name}-tiny": task
    for task in (
        TinyTask("maze", MAZE, _maze_words, _show_maze),
        TinyTask("cycle", CYCLE, _cycle_words, _show_cycle),
        TinyTask("telecom", TELECOM, _telecom_words, _show_telecom),
    )
}
"""`model.path` -> task."""
