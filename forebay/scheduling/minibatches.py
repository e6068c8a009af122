"""Homogeneous minibatches: the partition of the length-sorted prompts that wastes least padding (ASP, step 2).

With lengths sorted ascending, prefix sums P and a minibatch of prompts [i, j):
    utilisation u(i, j) = (P_j - P_i) / ((j - i) * l_j)       share of the padded rectangle that is real tokens
    F[m][j] = max over b in [B - d, B + d] of F[m - 1][j - b] + u(j - b, j);   F[0][0] = 0
    answer: the m that maximises F[m][N] / m, the mean utilisation.
O(N^2 d / B) time and memory, vectorised over j. Lengths must be positive and finite.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def partition(lengths: Sequence[float], base: int, slack: int) -> list[int]:
    """Sizes of consecutive minibatches of `lengths` (sorted ascending), each in [base - slack, base + slack].

    A number of prompts that no such sizes add up to leaves its remainder in one smaller minibatch at the short end,
    where padding is cheapest. Raises ValueError for lengths that are unsorted, not finite or not positive.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.size == 0:
        return []
    if not np.all(np.isfinite(values)) or values[0] <= 0 or np.any(np.diff(values) < 0):
        raise ValueError("predicted lengths must be finite, positive and sorted ascending")
    remainder = _remainder(values.size, base - slack, base + slack)
    head = [remainder] if remainder else []
    return head + _best_sizes(values[remainder:], base - slack, base + slack)


def _remainder(count: int, low: int, high: int) -> int:
    """Fewest prompts to leave over so that sizes in [low, high] add up to the rest."""
    return next(left for left in range(count + 1) if _feasible(count - left, low, high))


def _feasible(count: int, low: int, high: int) -> bool:
    return math.ceil(count / high) * low <= count


def _best_sizes(values: NDArray[np.float64], low: int, high: int) -> list[int]:
    count = values.size
    if count == 0:
        return []
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    most = count // low
    best = np.full((most + 1, count + 1), -np.inf)
    choice = np.zeros((most + 1, count + 1), dtype=np.int32)
    best[0, 0] = 0.0
    ends = np.arange(1, count + 1)
    for number in range(1, most + 1):
        for size in range(low, min(high, count) + 1):
            end = ends[size - 1 :]
            utilisation = (prefix[end] - prefix[end - size]) / (size * values[end - 1])
            score = best[number - 1, end - size] + utilisation
            better = score > best[number, end]
            best[number, end[better]] = score[better]
            choice[number, end[better]] = size
    numbers = np.arange(1, most + 1)
    number = int(numbers[np.argmax(best[1:, count] / numbers)])
    sizes = []
    end_at = count
    for m in range(number, 0, -1):
        sizes.append(int(choice[m, end_at]))
        end_at -= sizes[-1]
    return sizes[::-1]


def utilisation(lengths: Sequence[float], sizes: Sequence[int]) -> float:
    """Mean over minibatches of real tokens / padded tokens, for `lengths` cut into `sizes`; 1.0 if there are none."""
    values, start, shares = np.asarray(lengths, dtype=np.float64), 0, []
    for size in sizes:
        part = values[start : start + size]
        shares.append(float(part.sum() / (size * part.max())))
        start += size
    return float(np.mean(shares)) if shares else 1.0
