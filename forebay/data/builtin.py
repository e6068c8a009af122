"""The built-in tasks by name, drawn so that no two prompts of a run are equal.

Invariants:
- Each split has exactly the size asked for, and no prompt is in two splits or twice in one.
- The prompts depend on the data settings and the seed only.
- The test split is drawn first: the prompts that it takes are missing from training, not the other way round.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from forebay.config import DataConfig
from forebay.data.arithmetic import draw_sum
from forebay.data.maze import draw_maze, write_prompt
from forebay.data.schema import Draft
from forebay.data.shapes import draw_shapes
from forebay.errors import UserError

_TRIES = 50
"""Draws for each prompt asked for, on average, before a task is said to have too few."""


def _maze(rng: random.Random, data: DataConfig) -> tuple[str, Any]:
    maze = draw_maze(rng, data.maze.sizes)
    return write_prompt(maze), {"side": round(len(maze.passages) ** 0.5)}


def _sum(rng: random.Random, data: DataConfig) -> tuple[str, Any]:
    return draw_sum(rng)


def _shapes(rng: random.Random, data: DataConfig) -> tuple[str, Any, bytes]:
    return draw_shapes(rng)


MAZE = "builtin:maze"
BUILT_IN: dict[str, Callable[[random.Random, DataConfig], tuple[Any, ...]]] = {
    MAZE: _maze,
    "builtin:arithmetic": _sum,
    "builtin:shapes": _shapes,
}
"""Source name -> draws (prompt, answer, images if there are any)."""


def draw_splits(data: DataConfig, seed: int) -> dict[str, list[Draft]]:
    """Split name -> prompts; raises `UserError` if the task has too few different ones or is unknown."""
    draw = BUILT_IN.get(data.source)
    if draw is None:
        raise UserError(f"data.source {data.source}: the built-in tasks are {', '.join(BUILT_IN)}")
    sizes = {"test": data.test_prompts, "validation": data.validation_prompts, "train": data.train_prompts}
    seen: set[tuple[Any, ...]] = set()
    splits: dict[str, list[Draft]] = {}
    for name, size in sizes.items():
        rng = random.Random(f"{data.source} {seed} {name}")
        splits[name] = []
        tries = _TRIES * (size + 10)
        while len(splits[name]) < size:
            prompt, answer, *images = draw(rng, data)
            tries -= 1
            if (prompt, *images) not in seen:
                seen.add((prompt, *images))
                message = {"role": "user", "content": prompt}
                text = json.dumps(answer, sort_keys=True)
                splits[name].append(Draft((message,), text, data.source, drawn=tuple(images)))
            elif tries <= 0:
                hint = " or give larger mazes in data.maze.sizes" if data.source == MAZE else ""
                raise UserError(
                    f"data.source {data.source}: found only {len(seen)} different prompts of the "
                    f"{sum(sizes.values())} asked for: lower data.{name}_prompts{hint}"
                )
    return splits
