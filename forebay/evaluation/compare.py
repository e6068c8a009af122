"""Paired comparison of two models on the same prompts. Pure: numbers in, numbers out."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Comparison:
    """Rewards of the same prompts before and after training."""

    n: int
    before: float
    """Mean reward of the start model; with rewards 0 and 1, its accuracy."""
    after: float
    gained: int
    """Prompts whose reward rose."""
    lost: int
    """Prompts whose reward fell."""
    p_value: float
    """Two-sided, exact: how often chance alone would split the changed prompts at least as unevenly."""
    interval: tuple[float, float]
    """95% bootstrap interval of the mean paired difference, after - before."""


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare paired rewards with the sign test; on rewards 0 and 1 that is McNemar's exact test."""
    if len(before) != len(after) or not before:
        raise ValueError(f"paired rewards of the same prompts are needed, not {len(before)} and {len(after)}")
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    n = len(before)
    means = math.fsum(before) / n, math.fsum(after) / n
    return Comparison(n, *means, gained, lost, sign_test(gained, lost), bootstrap(before, after))


def bootstrap(before: Sequence[float], after: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean paired difference: prompts are drawn with replacement, `RESAMPLES` times
    (Efron 1979). A draw only says how often each distinct difference came, so its cost is their number, not n."""
    differences = np.subtract(after, before, dtype=np.float64)
    values, counts = np.unique(differences, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(differences.size, counts / differences.size, RESAMPLES)
    low, high = np.percentile(drawn @ values / differences.size, [2.5, 97.5])
    return float(low), float(high)


def verdict(p_value: float, before: float, after: float) -> str:
    """In words, for people: never more than the test says."""
    if p_value >= SIGNIFICANT:
        return "no evidence of change"
    return "better after training" if after > before else "worse after training" if after < before else "changed"


def sign_test(gained: int, lost: int) -> float:
    """Exact two-sided p-value of `gained` against `lost` if a fair coin decided each; unchanged pairs don't count.

    Twice the smaller binomial tail, at most 1 (McNemar 1947, exact form). In whole numbers: only the division rounds.
    """
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def by_category(
    categories: Sequence[Hashable], before: Sequence[float], after: Sequence[float]
) -> dict[str, tuple[int, float, float]]:
    """Category (as text, in order) -> (prompts, mean reward before, mean reward after)."""
    places: dict[Hashable, list[int]] = {}
    for place, category in enumerate(categories):
        places.setdefault(category, []).append(place)
    return {
        str(category): (
            len(rows),
            math.fsum(before[i] for i in rows) / len(rows),
            math.fsum(after[i] for i in rows) / len(rows),
        )
        for category, rows in sorted(places.items(), key=lambda item: str(item[0]))
    }


def compare_by_tag(
    tags: Sequence[Sequence[str]], before: Sequence[float], after: Sequence[float]
) -> dict[str, Comparison]:
    """Tag, in order -> the comparison of the prompts that have it."""
    places: dict[str, list[int]] = {}
    for place, own in enumerate(tags):
        for tag in own:
            places.setdefault(tag, []).append(place)
    return {tag: compare([before[i] for i in rows], [after[i] for i in rows]) for tag, rows in sorted(places.items())}


def pick_examples(before: Sequence[float], after: Sequence[float], count: int) -> list[int]:
    """Places of `count` prompts to show: in turn one that gained, lost, stayed good, stayed bad, first come first.

    Not only the flattering ones: a reader should see what training broke, too.
    """
    best = max(*before, *after) if before else 0.0
    kinds: tuple[list[int], ...] = ([], [], [], [])
    for place, (b, a) in enumerate(zip(before, after, strict=True)):
        kinds[0 if a > b else 1 if a < b else 2 if a == best else 3].append(place)
    turns = max((len(kind) for kind in kinds), default=0)
    return [kind[turn] for turn in range(turns) for kind in kinds if turn < len(kind)][:count]
