"""How even a schedule is: the coefficient of variation of the load of its batch groups, by prediction and in truth,
beside the same prompts in random order and sorted by predicted load, cut into batch groups of the same sizes.

A last batch group that is smaller than the first is left out: it has less load under every order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.control.types import Fate
from forebay.run import RunContext
from forebay.scheduling.batch_groups import variation
from forebay.scheduling.policies import Order, sums
from forebay.scheduling.predictions import read_columns

Vector = NDArray[np.float64]
ANSWERED = (Fate.TRAINED, Fate.FILTERED, Fate.STALE)
"""Fates of groups whose responses are whole."""


@dataclass(frozen=True)
class LoadVariation:
    """Coefficients of variation of load over batch groups."""

    scheduled: float
    random: float
    """The same prompts in random order."""
    sorted: float
    """And by predicted load."""


def predicted_variation(loads: Vector, order: Order, seed: int) -> LoadVariation:
    """`loads`: [P] predicted, by prompt index."""
    return _variation(loads[order.prompts], loads[order.prompts], order.group_prompts, seed)


def true_variation(run: RunContext) -> LoadVariation | None:
    """By the lengths in the run's ledger, over the batch groups whose prompts were all answered; None if there are
    not at least two of them. A prompt that was answered more than once counts with its mean."""
    files = run.root / "ledger.parquet", run.schedule / "schedule.parquet"
    if not all(path.is_file() for path in files):
        return None
    answered, true = _true_loads(run, pq.read_table(files[0], columns=["prompt_id", "fate", "lengths"]))  # type: ignore[no-untyped-call]
    schedule = read_columns(files[1], ("batch_group", "prompt_id", "predicted"))
    place = pc.index_in(schedule["prompt_id"], value_set=answered).combine_chunks()
    loads = np.append(true, np.nan)[pc.fill_null(place, len(true)).to_numpy()]
    _, group, sizes = np.unique(schedule["batch_group"].to_numpy(), return_inverse=True, return_counts=True)
    whole = ~np.isnan(np.add.reduceat(loads, np.cumsum(sizes) - sizes))
    if whole.sum() < 2:
        return None
    rows = whole[group]
    return _variation(loads[rows], schedule["predicted"].to_numpy()[rows], sizes[whole], run.config.seed)


def _true_loads(run: RunContext, ledger: pa.Table) -> tuple[pa.StringArray, Vector]:
    """The answered prompts and what each one weighed."""
    fates = pa.array([fate.value for fate in ANSWERED])
    kept = ledger.filter(
        pc.and_(pc.is_in(ledger["fate"], value_set=fates), pc.greater(pc.list_value_length(ledger["lengths"]), 0))
    )
    ids, lengths = kept["prompt_id"].combine_chunks(), kept["lengths"].combine_chunks()
    length = lengths.flatten().to_numpy().astype(np.float64)
    parents = pc.list_parent_indices(lengths).to_numpy()
    prompts, weights = ids.take(pa.array(parents)), length
    if run.config.schedule.load == "kv_area":
        predictions = read_columns(run.lengths / "predictions.parquet", ("prompt_id", "prompt_tokens"))
        found = pc.index_in(prompts, value_set=predictions["prompt_id"].combine_chunks())
        tokens: Any = predictions["prompt_tokens"].take(found).to_numpy()
        weights = tokens * length + length**2 / 2
    table = pa.table({"prompt_id": prompts, "load": weights}).group_by("prompt_id").aggregate([("load", "mean")])
    return table["prompt_id"].combine_chunks(), table["load_mean"].to_numpy()


def _variation(loads: Vector, predicted: Vector, sizes: NDArray[np.int64], seed: int) -> LoadVariation:
    """`loads` and `predicted` in schedule order; `sizes`: prompts in each batch group."""
    if sizes.size > 1 and sizes[-1] < sizes[0]:
        sizes = sizes[:-1]
    orders = (
        np.arange(loads.size),
        np.random.default_rng(seed).permutation(loads.size),
        np.argsort(predicted, kind="stable"),
    )
    return LoadVariation(*(variation(sums(loads[order][: sizes.sum()], sizes)) for order in orders))
