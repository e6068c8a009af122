"""The schedule: every training prompt exactly once, as ordered minibatches in balanced batch groups.

Artifact: schedule/schedule.parquet, one row a prompt in order: batch_group, minibatch, prompt_id, predicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import ScheduleConfig
from forebay.errors import UserError
from forebay.run import RunContext
from forebay.scheduling.batch_groups import arrange, variation
from forebay.scheduling.minibatches import partition, utilisation

FILE = "schedule.parquet"


@dataclass(frozen=True)
class ScheduleResult:
    """What was made and how good it is, by predicted lengths."""

    prompts: int
    minibatches: int
    batch_groups: int
    utilisation: float
    """Mean share of real tokens in padded minibatches, 0..1."""
    load_variation: float
    """Coefficient of variation of the batch groups' predicted tokens."""


def build(predicted: Sequence[tuple[str, float]], config: ScheduleConfig, seed: int) -> list[list[list[str]]]:
    """Batch groups of minibatches of prompt ids, from (prompt id, predicted length) pairs."""
    ranked = sorted(predicted, key=lambda item: (item[1], item[0]))
    sizes = partition([length for _, length in ranked], config.minibatch_prompts, config.minibatch_slack)
    minibatches, start = [], 0
    for size in sizes:
        minibatches.append(ranked[start : start + size])
        start += size
    loads = [sum(length for _, length in minibatch) for minibatch in minibatches]
    order = arrange(loads, config.period_minibatches, seed)
    return [[[prompt for prompt, _ in minibatches[index]] for index in group] for group in order]


def make_schedule(run: RunContext) -> ScheduleResult:
    """Read the predictions, write the schedule."""
    table = pq.read_table(run.lengths / "predictions.parquet").to_pylist()  # type: ignore[no-untyped-call]
    predicted = [(row["prompt_id"], float(row["predicted"])) for row in table]
    if not predicted:
        raise UserError(f"{run.lengths}: no prompts to schedule; the training split is empty")
    groups = build(predicted, run.config.schedule, run.config.seed)
    length = dict(predicted)
    write_schedule(run.schedule / FILE, groups, length)
    minibatches = [minibatch for group in groups for minibatch in group]
    shares = [utilisation([length[prompt] for prompt in minibatch], [len(minibatch)]) for minibatch in minibatches]
    loads = [sum(length[prompt] for minibatch in group for prompt in minibatch) for group in groups]
    return ScheduleResult(
        prompts=len(predicted),
        minibatches=len(minibatches),
        batch_groups=len(groups),
        utilisation=sum(shares) / len(shares),
        load_variation=variation(loads),
    )


def write_schedule(path: Path, groups: Sequence[Sequence[Sequence[str]]], predicted: dict[str, float]) -> None:
    """Write the artifact; folders are made."""
    rows = [
        {"batch_group": g, "minibatch": m, "prompt_id": prompt, "predicted": predicted[prompt]}
        for g, group in enumerate(groups)
        for m, minibatch in enumerate(group)
        for prompt in minibatch
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)  # type: ignore[no-untyped-call]


def read_schedule(path: Path) -> list[list[list[tuple[str, float]]]]:
    """Batch groups of minibatches of (prompt id, predicted length)."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()  # type: ignore[no-untyped-call]
    return [
        [[(row["prompt_id"], row["predicted"]) for row in minibatch] for minibatch in _runs(group, "minibatch")]
        for group in _runs(rows, "batch_group")
    ]


def _runs(rows: Iterable[dict[str, Any]], key: str) -> list[list[dict[str, Any]]]:
    return [list(part) for _, part in groupby(rows, key=lambda row: row[key])]
