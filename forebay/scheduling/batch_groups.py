"""Balanced batch groups: consecutive scheduling periods that carry about the same predicted load (ASP, step 3).

Longest processing time first with a cap on the number of minibatches in a group: the heaviest minibatch goes to the
lightest group that has room. O(M log M) for M minibatches. Load is the sum of predicted tokens.
"""

import heapq
import math
import random
from collections.abc import Sequence


def balance(loads: Sequence[float], per_group: int) -> list[list[int]]:
    """Indices of minibatches for each batch group: ceil(M / per_group) groups of at most `per_group` each."""
    if per_group < 1:
        raise ValueError("a batch group holds at least one minibatch")
    groups: list[list[int]] = [[] for _ in range(math.ceil(len(loads) / per_group))]
    heap = [(0.0, index) for index in range(len(groups))]
    for minibatch in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        load, index = heapq.heappop(heap)
        groups[index].append(minibatch)
        if len(groups[index]) < per_group:
            heapq.heappush(heap, (load + loads[minibatch], index))
    return groups


def arrange(loads: Sequence[float], per_group: int, seed: int) -> list[list[int]]:
    """Balanced groups in random order, long and short minibatches mixed within each, so that no stretch of the run
    sees only short or only long responses."""
    rng = random.Random(seed)
    groups = balance(loads, per_group)
    for group in groups:
        rng.shuffle(group)
    rng.shuffle(groups)
    return groups


def variation(loads: Sequence[float]) -> float:
    """Coefficient of variation (population standard deviation / mean); 0 for no loads."""
    if not loads:
        return 0.0
    mean = sum(loads) / len(loads)
    return math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads)) / mean if mean else 0.0
