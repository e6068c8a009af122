"""Homogeneous minibatches: the partition of the length-sorted prompts that wastes least padding (ASP, step 2).

With lengths l sorted ascending, prefix sums P, and a minibatch of the b prompts (j - b, j] padded to its longest:
    padded area   b l_j                             minimised in sum over minibatches
    utilisation   (P_j - P_{j-b}) / (b l_j)         maximised in the mean over minibatches
Both are shortest paths G_j = min over b in [B - d, B + d] of G_{j-b} + cost(j - b, j) over the prompts. The mean is a
ratio, (sum of utilisations) / (number of minibatches), so each round of Dinkelbach's method (W. Dinkelbach, On
nonlinear fractional programming, Management Science 13, 1967) solves the path with cost 1 - utilisation - mu, where
mu is the mean of the round before: exact, and it converges superlinearly.

Invariants:
- Lengths are positive, finite and sorted ascending; sizes add up to their number.
- O(N d) time for a path, O(N) memory: (B - d) consecutive ends depend only on earlier ones, so they are one vector
  operation, and costs are made for a part of the ends at a time.
- Of equally good sizes the one nearest to B is taken. Costs are taken above the shortest length, which changes no
  comparison but makes equal lengths exactly equal in cost.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Objective = Literal["utilisation", "padded_area"]
Vector = NDArray[np.float64]
Sizes = NDArray[np.int64]
Costs = Callable[[int, int], Vector]
"""(first, last) -> [last - first, sizes]: costs of the minibatches with these ends, the largest size first."""

PART = 1 << 18
"""Costs held at a time."""


def partition(lengths: ArrayLike, base: int, slack: int, objective: Objective = "utilisation") -> Sizes:
    """Sizes of consecutive minibatches of `lengths` (sorted ascending), each in [base - slack, base + slack].

    A number of prompts that no such sizes add up to leaves its remainder in one smaller minibatch at the short end,
    where padding is cheapest. Raises ValueError for lengths that are unsorted, not finite or not positive.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if not 0 <= slack < base:
        raise ValueError(f"minibatches of {base} prompts cannot have a slack of {slack}")
    if values.size and (not np.all(np.isfinite(values)) or values[0] <= 0 or np.any(np.diff(values) < 0)):
        raise ValueError("predicted lengths must be finite, positive and sorted ascending")
    left = remainder(values.size, base - slack, base + slack)
    rest = values[left:]
    if rest.size == 0 or slack == 0:
        best = np.full(rest.size // base, base, dtype=np.int64)
    elif objective == "padded_area":
        best = _path(rest.size, base, slack, _padded_areas(rest, base, slack))
    else:
        best = _highest_mean(rest, base, slack)
    return np.concatenate([np.full(1 if left else 0, left, dtype=np.int64), best])


def remainder(count: int, low: int, high: int) -> int:
    """Fewest prompts to leave over so that sizes in [low, high] add up to the rest."""
    return next(left for left in range(count + 1) if math.ceil((count - left) / high) * low <= count - left)


def utilisation(lengths: ArrayLike, sizes: Sequence[int] | Sizes) -> float:
    """Mean over minibatches of real tokens / padded tokens, for `lengths` (in any order) cut into `sizes`; 1.0 if
    there are none."""
    values, counts = np.asarray(lengths, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    if counts.size == 0:
        return 1.0
    starts = np.cumsum(counts) - counts
    padded = counts * np.maximum.reduceat(values, starts)
    return float(np.mean(np.add.reduceat(values, starts) / padded))


def _highest_mean(values: Vector, base: int, slack: int) -> Sizes:
    best, mean_loss = np.empty(0, dtype=np.int64), math.inf
    while True:
        target = 0.0 if mean_loss == math.inf else mean_loss
        sizes = _path(values.size, base, slack, _losses(values, base, slack, target))
        loss = 1.0 - utilisation(values, sizes)
        if loss >= mean_loss:
            return best
        best, mean_loss = sizes, loss


def _padded_areas(values: Vector, base: int, slack: int) -> Costs:
    sizes = _descending(base, slack)
    above = values - values[0]

    def costs(first: int, last: int) -> Vector:
        areas: Vector = above[first - 1 : last - 1, None] * sizes
        return areas

    return costs


def _losses(values: Vector, base: int, slack: int, mean: float) -> Costs:
    """1 - utilisation - mean, as (b l_j - (P_j - P_i)) / (b l_j) - mean."""
    sizes = _descending(base, slack)
    above = values - values[0]
    prefix = np.concatenate([np.zeros(base + slack + 1), np.cumsum(above)])  # P_{j-b} is at j - b + base + slack
    before = np.lib.stride_tricks.sliding_window_view(prefix, sizes.size)

    def costs(first: int, last: int) -> Vector:
        ends = slice(first - 1, last - 1)
        waste: Vector = above[ends, None] * sizes
        waste -= prefix[first + base + slack : last + base + slack, None]
        waste += before[first:last]
        waste /= values[ends, None] * sizes
        waste -= mean
        return waste

    return costs


def _descending(base: int, slack: int) -> Sizes:
    return np.arange(base + slack, base - slack - 1, -1)


def _path(count: int, base: int, slack: int, costs: Costs) -> Sizes:
    """The sizes of the cheapest partition of `count` prompts; there must be one."""
    low, high, width = base - slack, base + slack, 2 * slack + 1
    best = np.full(high + count + 1, np.inf)  # the cost of the first j prompts is at high + j
    best[high] = 0.0
    before = np.lib.stride_tricks.sliding_window_view(best, width)  # row j: the costs of j - high, ..., j - low
    preferred = np.argsort(np.abs(np.arange(width) - slack), kind="stable")
    choice = np.zeros(count + 1, dtype=np.int32)
    step = max(PART // width // low, 1) * low
    for first in range(1, count + 1, step):
        last = min(first + step, count + 1)
        cost = costs(first, last)
        _extend(best[high:], before, cost, first, low)
        cost += before[first:last]
        choice[first:last] = high - preferred[np.argmin(cost[:, preferred], axis=1)]
    return _walk_back(choice.tolist(), count)


def _extend(best: Vector, before: Vector, cost: Vector, first: int, low: int) -> None:
    """Fill `best` at `first` and the ends after it, one for each row of `cost`."""
    add, least = np.add, np.minimum.reduce
    scratch = np.empty((low, cost.shape[1]))
    for start in range(0, len(cost), low):
        part = cost[start : start + low]
        at = first + start
        until = at + len(part)
        best[at:until] = least(add(before[at:until], part, out=scratch[: len(part)]), axis=1)


def _walk_back(choice: list[int], count: int) -> Sizes:
    sizes = []
    while count:
        sizes.append(choice[count])
        count -= choice[count]
    return np.array(sizes[::-1], dtype=np.int64)
