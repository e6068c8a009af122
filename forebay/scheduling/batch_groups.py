"""Balanced batch groups: consecutive scheduling periods that carry about the same load (ASP, step 3).

Three ways to share M loads out over ceil(M / cap) groups of at most `cap`, heaviest first. All are O(M log M):
- `lpt`: longest processing time first; each load goes to the lightest group that has room.
- `karmarkar_karp`: differencing layer by layer. Layer i holds the i-th heaviest ceil(M / cap) loads, one for each
  group; the two layers (or sums of layers) of the widest spread are joined, the heaviest of one with the lightest of
  the other, until one is left. (The balanced largest-first differencing method: W. Michiels, J. Korst, E. Aarts and
  J. van Leeuwen, Performance ratios for the differencing method applied to the balanced number partitioning problem,
  2003.)
- `snake`: to and fro over the groups.

Invariants: every load is in one group; a group holds at least one and at most `cap`; equal input gives equal output.
"""

import heapq
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Grouping = Literal["lpt", "karmarkar_karp", "snake"]
Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


def balance(loads: ArrayLike, cap: int, grouping: Grouping = "lpt") -> Indices:
    """The batch group of each load. Loads are finite and not negative."""
    if cap < 1:
        raise ValueError("a batch group holds at least one minibatch")
    values = np.asarray(loads, dtype=np.float64)
    if values.size == 0:
        return np.zeros(0, dtype=np.int64)
    return _METHODS[grouping](values, cap, math.ceil(values.size / cap))


def variation(loads: ArrayLike) -> float:
    """Coefficient of variation (population standard deviation / mean); 0 for no loads."""
    values = np.asarray(loads, dtype=np.float64)
    mean = float(values.mean()) if values.size else 0.0
    return float(values.std()) / mean if mean else 0.0


def _lpt(loads: Vector, cap: int, groups: int) -> Indices:
    order = np.argsort(-loads, kind="stable")
    heap = [(0.0, group) for group in range(groups)]
    room = [cap] * groups
    chosen = []
    for load in loads[order].tolist():
        total, group = heap[0]
        chosen.append(group)
        room[group] -= 1
        if room[group]:
            heapq.heapreplace(heap, (total + load, group))
        else:
            heapq.heappop(heap)
    return _scattered(order, np.array(chosen, dtype=np.int64))


def _snake(loads: Vector, cap: int, groups: int) -> Indices:
    order = np.argsort(-loads, kind="stable")
    layer, place = np.divmod(np.arange(loads.size), groups)
    return _scattered(order, np.where(layer % 2, groups - 1 - place, place))


def _karmarkar_karp(loads: Vector, cap: int, groups: int) -> Indices:
    order = np.argsort(-loads, kind="stable")
    layers = np.zeros((cap, groups))
    layers.flat[: loads.size] = loads[order]  # the places without a load weigh nothing
    # A sum of layers: its group sums ascending, the permutation that sorted them, and the two sums it was joined from.
    sums = [(layer[::-1], np.arange(groups)[::-1], None) for layer in layers]
    parts: list[tuple[Vector, Indices, tuple[int, int] | None]] = [*sums]
    heap = [(part[0][0] - part[0][-1], index) for index, part in enumerate(parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        joined = parts[left][0] + parts[right][0][::-1]
        sort = np.argsort(joined, kind="stable")
        joined = joined[sort]
        heapq.heappush(heap, (joined[0] - joined[-1], len(parts)))
        parts.append((joined, sort, (left, right)))
    return _scattered(order, _labels(parts, cap, groups).reshape(-1)[: loads.size])


def _labels(parts: list[tuple[Vector, Indices, tuple[int, int] | None]], cap: int, groups: int) -> Indices:
    """[cap, groups]: the group of each place of each layer, handed down from the last sum to the layers."""
    result = np.zeros((cap, groups), dtype=np.int64)
    stack = [(len(parts) - 1, np.arange(groups))]
    while stack:
        index, labels = stack.pop()
        _, sort, joined = parts[index]
        unsorted = np.empty_like(labels)
        unsorted[sort] = labels
        if joined is None:
            result[index] = unsorted
        else:
            stack.append((joined[0], unsorted))
            stack.append((joined[1], unsorted[::-1]))
    return result


def _scattered(order: Indices, groups: Indices) -> Indices:
    """From groups in the sequence `order` to groups by index."""
    result = np.empty_like(groups)
    result[order] = groups
    return result


_METHODS: dict[Grouping, Callable[[Vector, int, int], Indices]] = {
    "lpt": _lpt,
    "karmarkar_karp": _karmarkar_karp,
    "snake": _snake,
}
