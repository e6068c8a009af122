"""The built-in tasks by name, drawn so that no two prompts of a run are equal.

Invariants:
- Each split has exactly the size asked for, and no prompt is in two splits or twice in one.
- The prompts depend on the data settings and the seed only.
- The test split is drawn first: the prompts that it takes are missing from training, not the other way round.
"""

import json
import random
from collections.abc import Callable

from forebay.config import DataConfig
from forebay.data.arithmetic import draw_sum
from forebay.data.cycle import draw_cycle
from forebay.data.maze import draw_maze, write_prompt
from forebay.data.question import Question
from forebay.data.reasoning_gym import PREFIX as REASONING_GYM
from forebay.data.reasoning_gym import open_task
from forebay.data.schema import Draft
from forebay.data.shapes import draw_shapes
from forebay.data.telecom import FAMILIES
from forebay.errors import UserError

_TRIES = 50
"""Draws for each prompt asked for, on average, before a task is said to have too few."""
_IN_A_ROW = 10_000
"""Draws in a row of prompts that there are already, before the same is said: sizes of millions end soon, too."""

DrawFrom = Callable[[random.Random, DataConfig], Question]


def _maze(rng: random.Random, data: DataConfig) -> Question:
    maze = draw_maze(rng, data.maze.sizes)
    side = round(len(maze.passages) ** 0.5)
    return Question(write_prompt(maze), {"side": side}, tags=(f"side:{side}",))


def _sum(rng: random.Random, data: DataConfig) -> Question:
    return Question(*draw_sum(rng))


def _cycle(rng: random.Random, data: DataConfig) -> Question:
    return draw_cycle(rng, (data.cycle.min_terms, data.cycle.max_terms), data.cycle.target)


def _telecom(rng: random.Random, data: DataConfig) -> Question:
    families, difficulty = data.telecom.families, data.telecom.difficulty
    family = rng.choices(list(families), list(families.values()))[0]
    return FAMILIES[family](rng, rng.choices(list(difficulty), list(difficulty.values()))[0])


def _shapes(rng: random.Random, data: DataConfig) -> Question:
    prompt, answer, image = draw_shapes(rng)
    return Question(prompt, answer, images=(image,))


MAZE, CYCLE, TELECOM = "builtin:maze", "builtin:cycle", "builtin:telecom"
BUILT_IN: dict[str, DrawFrom] = {
    MAZE: _maze,
    "builtin:arithmetic": _sum,
    CYCLE: _cycle,
    TELECOM: _telecom,
    "builtin:shapes": _shapes,
}
"""Source name -> draws a question."""

_HINTS = {
    MAZE: " or give larger mazes in data.maze.sizes",
    CYCLE: " or raise data.cycle.max_terms",
    TELECOM: " or name more families or difficulties in data.telecom",
}


def draw_splits(data: DataConfig, seed: int) -> dict[str, list[Draft]]:
    """Split name -> prompts; raises `UserError` if the task has too few different ones or is unknown."""
    draw = open_task(data.source) if data.source.startswith(REASONING_GYM) else BUILT_IN.get(data.source)
    if draw is None:
        raise UserError(
            f"data.source {data.source}: the built-in tasks are {', '.join([*BUILT_IN, REASONING_GYM])}NAME"
        )
    sizes = {"test": data.test_prompts, "validation": data.validation_prompts, "train": data.train_prompts}
    seen: set[tuple[str, tuple[bytes, ...]]] = set()
    splits: dict[str, list[Draft]] = {}
    for name, size in sizes.items():
        rng = random.Random(f"{data.source} {seed} {name}")
        splits[name] = []
        tries, repeats = _TRIES * (size + 10), 0
        while len(splits[name]) < size:
            question = draw(rng, data)
            tries -= 1
            if (question.prompt, question.images) not in seen:
                seen.add((question.prompt, question.images))
                repeats = 0
                splits[name].append(_draft(question, data.source))
                continue
            repeats += 1
            if tries <= 0 or repeats >= _IN_A_ROW:
                raise UserError(
                    f"data.source {data.source}: found only {len(seen)} different prompts of the "
                    f"{sum(sizes.values())} asked for: lower data.{name}_prompts{_HINTS.get(data.source, '')}"
                )
    return splits


def _draft(question: Question, source: str) -> Draft:
    message = {"role": "user", "content": question.prompt}
    answer = json.dumps(question.answer, sort_keys=True)
    return Draft((message,), answer, source, question.verifier, drawn=question.images, tags=question.tags)
