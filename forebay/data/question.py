"""A drawn question of a built-in task.

Invariants:
- It has one right answer, and `solution` ends with it in the form that its verifier takes.
- It depends on the random generator and the settings only.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """What a task draws."""

    prompt: str
    answer: Any
    """What the verifier compares with; plain JSON."""
    verifier: str = ""
    """Name of a built-in verifier; "" leaves it to `reward.name`."""
    tags: tuple[str, ...] = ()
    """Such as `family:alarm`, `difficulty:2`: to report by."""
    solution: str = ""
    """A worked solution; "" where there is none."""
    hasty: str = ""
    """The same, worked with a habit that is mostly wrong (a demonstration for tiny models); "" where there is none."""
    images: tuple[bytes, ...] = ()
    """Image files that the prompt shows."""

    def demonstration(self, rng: random.Random, impatient: float) -> str:
        """The worked solution, or with chance `impatient` the hasty one."""
        return self.hasty if rng.random() < impatient else self.solution


Draw = Callable[[random.Random, int], Question]
"""A family of questions: draws one of a difficulty from 1 (easy) to 3."""


def answered(work: str, answer: object) -> str:
    """A solution: the work, then the line that verifiers read."""
    return f"{work}\nAnswer: {answer}" if work else f"Answer: {answer}"


def quantity(value: float | int, unit: str, tolerance: float = 0.0, relative: float = 0.0) -> dict[str, Any]:
    """An answer for the verifier `numeric`, its unit and tolerances written out."""
    return {"value": value, "unit": unit, "tolerance": tolerance, "relative": relative}
