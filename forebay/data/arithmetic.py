"""The built-in arithmetic task: sums and differences of two digits, asked in English, for a small language model.

Invariants:
- A prompt has one answer, a whole number from 0 to 18, which the reward `math` checks.
- There are 504 different prompts.
"""

import random

_WAYS = ("What is {}?", "How much is {}?", "Calculate {}.", "What do you get for {}?")


def draw_sum(rng: random.Random) -> tuple[str, int]:
    """A question and its answer."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    way = rng.choice(_WAYS)
    if rng.random() < 0.5:
        return way.format(f"{a} + {b}"), a + b
    a, b = max(a, b), min(a, b)
    return way.format(f"{a} - {b}"), a - b
