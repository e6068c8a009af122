"""Tasks of the package reasoning-gym as an optional source: `builtin:reasoning_gym/NAME`.

Invariants:
- An answer is right if the task's own verifier gives it the full score. What it gives in part for an answer that merely
  contains the right one (most tasks) counts as wrong.
- A task whose verifier does not give its own answer the full score is refused.
- Nothing is imported until such a source is asked for.
"""

import importlib.util
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from forebay.data.question import Question
from forebay.errors import UserError

PREFIX = "builtin:reasoning_gym/"
VERIFIER = "reasoning_gym"
_LARGEST_SEED = 2**31
_HOW = "install it with: pip install 'forebay[reasoning-gym]'"


def open_task(source: str) -> Callable[[random.Random, object], Question]:
    """What draws the task's questions; raises `UserError` if the package or the task is missing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"data.source {source}: package reasoning-gym is missing; {_HOW}")
    name = source.removeprefix(PREFIX)
    try:
        data_set(name, 0)
    except ValueError as error:
        raise UserError(f"data.source {source}: {error}") from None

    def draw(rng: random.Random, data: object) -> Question:
        seed = rng.randrange(_LARGEST_SEED)
        item = data_set(name, seed)[0]
        own = item["answer"]
        if not isinstance(own, str) or data_set(name, seed).score_answer(own, item) != 1.0:
            raise UserError(f"data.source {source}: its verifier does not accept its own answer; choose another task")
        prompt = f"{item['question']}\nEnd with a line `Answer: ...`."
        return Question(prompt, {"task": name, "seed": seed}, VERIFIER, (f"task:{name}",), f"Answer: {own}")

    return draw


@cache
def _package() -> Any:
    import reasoning_gym

    return reasoning_gym


def data_set(name: str, seed: int) -> Any:
    """One item of the task, as a data set; `ValueError` if there is no such task."""
    return _package().create_dataset(name, size=1, seed=seed)
