"""Splits by hash: train, validation and test never share a prompt, whatever is added to the data later.

Invariants:
- A prompt's split depends on its id and on the three sizes asked for, not on the other rows: in a longer file, an old
  test prompt is never a training prompt.
- Each row is in exactly one of train, validation, test, unused.
- If there are fewer rows than asked for, each split gets about its share of what there is.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from forebay.config import DataConfig
from forebay.data.schema import Row

SPLITS = ("train", "validation", "test")


def orders(prompt_ids: Sequence[str], data: DataConfig) -> dict[str, np.ndarray]:
    """Split -> places of its rows, in order of a hash (that is, shuffled, but always alike)."""
    sizes = {"test": data.test_prompts, "validation": data.validation_prompts, "train": data.train_prompts}
    if data.test_source is not None:
        sizes["test"] = 0
    points = _points(prompt_ids)
    order = np.argsort(points, kind="stable")
    whole, start, found = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        end = start + size
        low, high = np.searchsorted(points[order] * whole, [start, end if name != "train" else np.inf])
        found[name], start = order[low:high], end
    return found


def shuffled(prompt_ids: Sequence[str]) -> np.ndarray:
    """Places of all rows, in order of the hash."""
    return np.argsort(_points(prompt_ids), kind="stable")


def _points(prompt_ids: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(place, prompt_ids), float, len(prompt_ids))


def smallest(rows: Sequence[Row], size: int) -> list[Row]:
    """The first `size` in the order of the hash."""
    return sorted(rows, key=lambda row: place(row.prompt_id))[:size]


def fill_empty(splits: dict[str, list[Row]]) -> None:
    """A training or test split that would be empty takes one row from validation, or else from the other."""
    for name in ("train", "test"):
        donor = splits["validation"] or max(splits.values(), key=len)
        if not splits[name] and donor:
            splits[name].append(donor.pop())


def place(prompt_id: str) -> float:
    """A point in [0, 1), evenly spread over ids and independent of other uses of the id."""
    return int(hashlib.sha256(f"split {prompt_id}".encode()).hexdigest()[:12], 16) / 16**12
