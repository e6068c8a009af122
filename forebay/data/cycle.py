"""The built-in cycle task: terms are added in turn, again and again, until the total reaches a target.

Invariants:
- Totals never fall below 0 and the target is reached within `MOST_STEPS` steps, after the first round in most cases.
- The answer is the letter of the last term added with the total then, as in `c15`.
- The hasty solution stops after the first round.
"""

import random

from forebay.data.question import Question, answered

LETTERS = "abcdefgh"
MOST_STEPS = 60
_LARGEST_TERM = 9
_RULE = "Add the terms in turn, from the first again after the last, until the total is at least "
_ASK = ". Which term is the last, with which total?"


def draw_cycle(rng: random.Random, terms: tuple[int, int], target: int) -> Question:
    """`terms`: fewest and most; `target`: highest, at least 6."""
    while True:
        count = rng.randint(*terms)
        numbers = [rng.choice((1, -1)) * rng.randint(1, _LARGEST_TERM) for _ in range(count)]
        goal = rng.randint(6, target)
        totals = running_totals(numbers, goal)
        if totals and (len(totals) > count or rng.random() < 0.2):
            break
    prompt = "".join(f"{letter}{number:+d} " for letter, number in zip(LETTERS, numbers, strict=False))
    steps = [f"{LETTERS[at % count]}{total}" for at, total in enumerate(totals)]
    first = steps[:count]
    return Question(
        f"{_RULE}{goal}{_ASK} Terms: {prompt}".rstrip(),
        steps[-1],
        "math",
        (f"terms:{count}",),
        answered(" ".join(steps), steps[-1]),
        answered(" ".join(first), first[-1]),
    )


def running_totals(numbers: list[int], goal: int) -> list[int]:
    """The totals up to the first that reaches the goal; empty if one is below 0 or there are too many."""
    totals: list[int] = []
    while not totals or totals[-1] < goal:
        total = (totals[-1] if totals else 0) + numbers[len(totals) % len(numbers)]
        if total < 0 or len(totals) == MOST_STEPS:
            return []
        totals.append(total)
    return totals


def words(terms: tuple[int, int], target: int) -> list[str]:
    """Every piece of a prompt or solution."""
    letters = LETTERS[: terms[1]]
    signed = [f"{letter}{number:+d}" for letter in letters for number in range(-9, 10) if number]
    totals = [str(total) for total in range(target + _LARGEST_TERM)]
    return [_RULE, f"{_ASK} Terms: ", *signed, *letters, *totals, " "]
