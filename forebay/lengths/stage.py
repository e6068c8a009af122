"""Profile a part of the prompts on the start model through vLLM, fit the predictor, predict every training prompt.

Artifacts: lengths/profile.parquet (what was observed) and lengths/predictions.parquet (every training prompt).
The rank correlation is measured on profiled prompts that the fit did not see.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.control.types import NOTHING, EngineFailure, RequestRefused, Sample
from forebay.data.schema import Row, read_rows
from forebay.errors import RunError, UserError
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.lengths.predictor import fit, spearman
from forebay.run import RunContext

ATTEMPTS = 3
"""Times that one prompt is tried after engine failures."""


@dataclass(frozen=True)
class LengthsResult:
    """How well lengths can be told before the run."""

    profiled: int
    """Prompts that were answered."""
    spearman: float | None
    """Rank correlation of predicted and observed mean lengths on held-out prompts; None if either is constant."""
    mean_length: float
    """Observed, in tokens."""
    truncated: float
    """Share of responses cut at the budget."""
    penalty: float
    """Ridge penalty that was chosen."""


def predict_lengths(run: RunContext) -> LengthsResult:
    """Profile, fit, predict, write the two artifacts."""
    rows = read_rows(run.data / "train.parquet")
    chosen = _choose(rows, run)
    answers = asyncio.run(_profile(run, chosen))
    profiled = [(row, samples) for row, samples in zip(chosen, answers, strict=True) if samples]
    if len(profiled) < 4:
        raise RunError(f"lengths: only {len(profiled)} of {len(chosen)} profiled prompts were answered, 4 are needed")
    means = [sum(len(sample.ids) for sample in samples) / len(samples) for _, samples in profiled]
    held_out = max(2, round(len(profiled) * run.config.lengths.test_share))
    prompts = [row.prompt_ids for row, _ in profiled]
    budget = run.config.generation.max_new_tokens
    judged = fit(prompts[held_out:], means[held_out:], budget)
    rank = spearman(list(judged.predict(prompts[:held_out])), means[:held_out])
    predictor = fit(prompts, means, budget)
    predicted = predictor.predict([row.prompt_ids for row in rows])
    run.lengths.mkdir(parents=True, exist_ok=True)
    table = {"prompt_id": [row.prompt_id for row in rows], "predicted": [float(value) for value in predicted]}
    pq.write_table(pa.table(table), run.lengths / "predictions.parquet")
    _write_profile(run, profiled, means, judged.predict(prompts), held_out)
    samples = [sample for _, group in profiled for sample in group]
    return LengthsResult(
        profiled=len(profiled),
        spearman=rank,
        mean_length=sum(len(sample.ids) for sample in samples) / len(samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        penalty=predictor.penalty,
    )


def _choose(rows: Sequence[Row], run: RunContext) -> list[Row]:
    """A random part of the prompts, at most half of them unless there are fewer than eight."""
    if not rows:
        raise UserError(f"{run.data / 'train.parquet'}: the training split is empty")
    count = min(run.config.lengths.profile_prompts, max(len(rows) // 2, min(len(rows), 4)))
    return random.Random(run.config.seed).sample(list(rows), count)


async def _profile(run: RunContext, rows: Sequence[Row]) -> list[list[Sample]]:
    async with Fleet(run, run.start_model, plan_cores(run.config)) as fleet:
        jobs = [asyncio.create_task(_answer(run, fleet, i, row)) for i, row in enumerate(rows)]
        try:
            return list(await asyncio.gather(*jobs))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)


async def _answer(run: RunContext, fleet: Fleet, index: int, row: Row) -> list[Sample]:
    """The responses to one prompt; empty if no engine takes it. Raises `EngineFailure` after `ATTEMPTS`."""
    size, engine = run.config.lengths.samples, index % len(fleet.engines)
    seed = run.config.seed * 1_000_003 + index
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await fleet.engines[engine].generate(row.prompt_ids, [NOTHING] * size, seed)
        except RequestRefused:
            return []
        except EngineFailure:
            if attempt == ATTEMPTS:
                raise
            await fleet.revive(engine)
    return []


def _write_profile(
    run: RunContext, profiled: Sequence[tuple[Row, list[Sample]]], means: Sequence[float], judged: Any, held_out: int
) -> None:
    """One row a profiled prompt; `predicted` of a held-out one comes from the fit that did not see it."""
    records = [
        {
            "prompt_id": row.prompt_id,
            "lengths": [len(sample.ids) for sample in samples],
            "truncated": [sample.finish_reason == "length" for sample in samples],
            "mean": mean,
            "predicted": float(predicted),
            "held_out": index < held_out,
        }
        for index, ((row, samples), mean, predicted) in enumerate(zip(profiled, means, judged, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(records), run.lengths / "profile.parquet")
