"""Training prompts and observed lengths in columns: what profiling, prediction and reports work on.

Invariants: the token ids of prompt i are `tokens[starts[i]:starts[i + 1]]`; a length is a number of response tokens,
the end token included, and a truncated one is the budget at which the response was cut off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.errors import RunError

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Prompts:
    """P prompts."""

    ids: list[str]
    tokens: NDArray[np.int32]
    """Token ids of all prompts, one after another."""
    starts: Indices
    """[P + 1]."""
    greedy_tokens: Vector
    """[P] length of the start model's greedy response; NaN where it was not asked for."""
    greedy_logprob: Vector
    """[P] and its log-probability, summed over its tokens; NaN likewise."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> Indices:
        """[P] tokens of each prompt."""
        return np.diff(self.starts)

    def tokens_of(self, index: int) -> list[int]:
        """The token ids of one prompt."""
        found: list[int] = self.tokens[self.starts[index] : self.starts[index + 1]].tolist()
        return found

    def take(self, index: Indices) -> "Prompts":
        """Some of the prompts, in this order."""
        parts = [self.tokens[self.starts[i] : self.starts[i + 1]] for i in index]
        starts = np.concatenate([[0], np.cumsum(self.sizes[index])]).astype(np.int64)
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        ids = [self.ids[i] for i in index]
        return Prompts(ids, tokens, starts, self.greedy_tokens[index], self.greedy_logprob[index])

    def chunks(self, size: int) -> Iterator["Prompts"]:
        """All prompts in turn, `size` at a time; the arrays are views."""
        for start in range(0, len(self), size):
            end = min(start + size, len(self))
            first, last = self.starts[start], self.starts[end]
            yield Prompts(
                self.ids[start:end],
                self.tokens[first:last],
                self.starts[start : end + 1] - first,
                self.greedy_tokens[start:end],
                self.greedy_logprob[start:end],
            )

    def with_greedy(self, tokens: Vector, logprob: Vector) -> "Prompts":
        """The same prompts with the start model's greedy responses."""
        return replace(self, greedy_tokens=tokens, greedy_logprob=logprob)


def make_prompts(ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> Prompts:
    """From lists; no greedy responses."""
    starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in token_ids])]).astype(np.int64)
    flat = np.array([token for tokens in token_ids for token in tokens], dtype=np.int32)
    unknown = np.full(len(ids), np.nan)
    return Prompts(list(ids), flat, starts, unknown, unknown)


def read_prompts(path: Path) -> Prompts:
    """Of a file with Forebay's rows, without making an object of each. Raises `RunError` if it cannot be read."""
    try:
        table = pq.read_table(path, columns=["prompt_id", "prompt_ids"]).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read as Forebay's rows ({str(error).splitlines()[0]})") from None
    if not table.num_rows:
        return make_prompts([], [])
    lists = table["prompt_ids"].chunk(0)
    starts = lists.offsets.to_numpy().astype(np.int64)
    flat = lists.values.to_numpy(zero_copy_only=False).astype(np.int32)
    unknown = np.full(table.num_rows, np.nan)
    ids: list[str] = table["prompt_id"].to_pylist()
    return Prompts(ids, flat[starts[0] : starts[-1]], starts - starts[0], unknown, unknown)


def read_images(path: Path) -> dict[str, tuple[str, ...]]:
    """Prompt id -> names of its images, for the prompts of such a file that have some."""
    try:
        table = pq.read_table(path, columns=["prompt_id", "images"])
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read as Forebay's rows ({str(error).splitlines()[0]})") from None
    table = table.filter(pc.greater(pc.list_value_length(table["images"]), 0))
    return {row["prompt_id"]: tuple(row["images"]) for row in table.to_pylist()}


@dataclass(frozen=True)
class Observed:
    """R responses to P prompts."""

    prompts: int
    owner: Indices
    """[R] prompt of each response, ascending; a prompt may have none."""
    lengths: Vector
    """[R] >= 1."""
    truncated: NDArray[np.bool_]
    """[R] whether the response was cut off: its true length is at least this."""

    @property
    def counts(self) -> Indices:
        """[P] responses of each prompt."""
        return np.bincount(self.owner, minlength=self.prompts)

    def means(self) -> Vector:
        """[P] mean length of each prompt's responses as they are; NaN for none."""
        counts = self.counts
        sums = np.bincount(self.owner, weights=self.lengths, minlength=self.prompts)
        return np.asarray(np.divide(sums, counts, out=np.full(self.prompts, np.nan), where=counts > 0))

    def take(self, index: Indices) -> "Observed":
        """Some of the prompts, in this order."""
        lists = self.lists()
        return observe([lists[i] for i in index])

    def lists(self) -> list[tuple[list[float], list[bool]]]:
        """(lengths, truncated) of each prompt."""
        cuts = np.cumsum(self.counts)[:-1]
        pairs = zip(np.split(self.lengths, cuts), np.split(self.truncated, cuts), strict=True)
        return [(lengths.tolist(), truncated.tolist()) for lengths, truncated in pairs]


def observe(responses: Sequence[tuple[Sequence[float], Sequence[bool]]]) -> Observed:
    """From (lengths, truncated) of each prompt."""
    owner = np.repeat(np.arange(len(responses)), [len(lengths) for lengths, _ in responses])
    lengths = np.array([length for lengths, _ in responses for length in lengths], dtype=np.float64)
    truncated = np.array([flag for _, flags in responses for flag in flags], dtype=np.bool_)
    return Observed(len(responses), owner.astype(np.int64), lengths, truncated)
