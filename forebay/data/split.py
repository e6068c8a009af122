"""Splits by hash: train, validation and test never share a prompt, whatever is added to the data later.

Invariants:
- A prompt's split depends on its id and on the three sizes asked for, not on the other rows: in a longer file, an old
  test prompt is never a training prompt.
- Each row is in exactly one of train, validation, test, unused.
- If there are fewer rows than asked for, each split gets about its share of what there is.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config import DataConfig
from forebay.data.schema import Row

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows of each split, in order of a hash (that is, shuffled, but always alike)."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    unused: int
    """Good rows beyond the sizes asked for."""


def split_rows(rows: Sequence[Row], data: DataConfig) -> Splits:
    """At most `data.{train,validation,test}_prompts` each; there are two rows or more, with distinct ids.

    A training or test split that would be empty takes one row from validation, or else from the other.
    """
    sizes = {"train": data.train_prompts, "validation": data.validation_prompts, "test": data.test_prompts}
    whole = sum(sizes.values())
    shares: dict[str, list[Row]] = {name: [] for name in SPLITS}
    for row in sorted(rows, key=lambda row: _place(row.prompt_id)):
        point = _place(row.prompt_id) * whole
        if point < sizes["test"]:
            shares["test"].append(row)
        elif point < sizes["test"] + sizes["validation"]:
            shares["validation"].append(row)
        else:
            shares["train"].append(row)
    for name in ("train", "test"):
        donor = shares["validation"] or max(shares.values(), key=len)
        if not shares[name] and donor:
            shares[name].append(donor.pop())
    kept = {name: share[: sizes[name]] for name, share in shares.items()}
    return Splits(**kept, unused=len(rows) - sum(map(len, kept.values())))


def _place(prompt_id: str) -> float:
    """A point in [0, 1), evenly spread over ids and independent of other uses of the id."""
    return int(hashlib.sha256(f"split {prompt_id}".encode()).hexdigest()[:12], 16) / 16**12
