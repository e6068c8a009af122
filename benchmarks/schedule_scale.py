"""What scheduling costs and gains at scale: a million log-normal lengths on one core.

    python -m benchmarks.schedule_scale [--prompts 1000000]

Minibatches: the lengths are sorted and cut by both objectives, with sizes 16 +- 4 and 4 +- 1.
What that gains: 4,096 prompts with 8 responses each, cut at random, by predicted length into minibatches of one fixed
size (the base size, and the mean size that an objective chose, since smaller minibatches are more homogeneous anyway),
and by both objectives. Utilisation is the mean share of real tokens in padded minibatches, by the predictions (rank
correlation 0.8) and by the true lengths.
Batch groups: the minibatches of 4 +- 1 prompts in groups of 4 by each method, and in random and sorted order; variation
is the coefficient of variation of a group's load, by the same predictions and by the true lengths.
Policies: the order of all prompts, and the whole artifact, written, found again and read.

Each part runs in a fresh process pinned to one core. `seconds` and `peak_mb` are of the padded-area objective with
sizes 16 +- 4: sort and cut; the peak is the resident memory of that whole process (VmHWM: interpreter, libraries and
lengths included). `seconds` is wall time, `cpu_s` processor time, for a machine that others use too.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.results import report
from forebay.config import RunConfig, ScheduleConfig, StorageConfig
from forebay.config.sections import AssumedLengthsConfig
from forebay.lengths.assumed import draw, prompt_ids
from forebay.run import RunContext
from forebay.scheduling.batch_groups import balance, variation
from forebay.scheduling.minibatches import Objective, partition, utilisation
from forebay.scheduling.policies import Policy, make_order, sums
from forebay.scheduling.schedule import FILE, make_schedule, read_schedule

SIZES = ((16, 4), (4, 1))
OBJECTIVES: tuple[Objective, ...] = ("padded_area", "utilisation")
FEW = 4096
PER_GROUP = 4
GROUP_SIZE, LONGEST = 8, 8192
ASSUMED = AssumedLengthsConfig()
POLICIES: tuple[Policy, ...] = ("fifo", "longest_first", "balanced", "asp")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    count = parser.parse_args().prompts
    rows: list[Row] = []
    for base, slack in SIZES:
        for objective in OBJECTIVES:
            rows += _alone(_minibatches, count, base, slack, objective)
    rows += _alone(_gain)
    rows += _alone(_batch_groups, count)
    for policy in POLICIES:
        rows += _alone(_order, count, policy)
    rows += _alone(_artifact, count)
    target = rows[0]
    result = {"prompts": count, **{name: target[name] for name in ("seconds", "peak_mb", "cpu_s")}, "cores": 1}
    found = {row["what"]: row for row in rows}
    for name in ("lpt", "karmarkar_karp", "snake", "random order", "sorted"):
        row = found[f"groups: {name}"]
        result[f"{name.split()[0]}_true_variation"] = row["true variation"]
    result["utilisation_seconds"] = found["16 +- 4, utilisation"]["seconds"]
    result["artifact_seconds"] = found["artifact: make"]["seconds"]
    report("schedule_scale", f"{count:,} prompts on one core", rows, result)


def _alone(measure: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """Run a part in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1, _one_core) as pool:
        return pool.apply(measure, arguments)


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _minibatches(count: int, base: int, slack: int, objective: Objective) -> list[Row]:
    lengths = np.random.default_rng(0).lognormal(np.log(ASSUMED.median), ASSUMED.prompt_sd, count)
    started = _now()
    lengths.sort()
    sizes = partition(lengths, base, slack, objective)
    return [_row(f"{base} +- {slack}, {objective}", started) | {"minibatches": sizes.size}]


def _gain() -> list[Row]:
    base, slack = 8, 2
    drawn = draw(FEW, GROUP_SIZE, ASSUMED, LONGEST, seed=0)
    in_order = np.argsort(drawn.predicted, kind="stable")
    cuts = {name: partition(drawn.predicted[in_order], base, slack, name) for name in OBJECTIVES}
    mean = FEW / cuts["utilisation"].size
    smaller = np.diff(np.rint(np.arange(cuts["utilisation"].size + 1) * mean).astype(int))
    fixed = partition(drawn.predicted[in_order], base, 0)
    rows = [
        ("random order, 8", np.arange(FEW), fixed),
        ("by prediction, 8", in_order, fixed),
        (f"by prediction, {mean:.2f}", in_order, smaller),
        *((f"8 +- 2, {name}", in_order, sizes) for name, sizes in cuts.items()),
    ]
    return [
        {
            "what": f"4,096 prompts: {name}",
            "minibatches": sizes.size,
            "utilisation": utilisation(drawn.predicted[order], sizes),
            "true utilisation": utilisation(drawn.lengths[order].ravel(), sizes * GROUP_SIZE),
        }
        for name, order, sizes in rows
    ]


def _batch_groups(count: int) -> list[Row]:
    drawn = draw(count, GROUP_SIZE, ASSUMED, LONGEST, seed=0)
    order = np.argsort(drawn.predicted, kind="stable")
    sizes = partition(drawn.predicted[order], 4, 1)
    loads = [sums(values[order], sizes) for values in (drawn.predicted, drawn.lengths.mean(axis=1))]
    shuffled = np.random.default_rng(0).permutation(sizes.size)
    in_order = np.arange(sizes.size) // PER_GROUP
    methods: dict[str, Callable[[], np.ndarray]] = {
        "lpt": lambda: balance(loads[0], PER_GROUP, "lpt"),
        "karmarkar_karp": lambda: balance(loads[0], PER_GROUP, "karmarkar_karp"),
        "snake": lambda: balance(loads[0], PER_GROUP, "snake"),
        "random order": lambda: in_order[shuffled],
        "sorted": lambda: in_order,
    }
    rows = []
    for name, method in methods.items():
        started = _now()
        group = method()
        row = _row(f"groups: {name}", started) | {"minibatches": sizes.size}
        of_groups = [variation(np.bincount(group, weights=load)) for load in loads]
        rows.append(row | {"variation": of_groups[0], "true variation": of_groups[1]})
    return rows


def _order(count: int, policy: Policy) -> list[Row]:
    drawn = draw(count, GROUP_SIZE, ASSUMED, LONGEST, seed=0)
    started = _now()
    order = make_order(drawn.predicted, None, ScheduleConfig(policy=policy), "fully_async", 16, 0)
    row = _row(f"policy: {policy}", started) | {"minibatches": order.minibatches.size}
    loads = (drawn.predicted, drawn.lengths.mean(axis=1))
    of_groups = [variation(sums(load[order.prompts], order.group_prompts)) for load in loads]
    return [row | {"variation": of_groups[0], "true variation": of_groups[1]}]


def _artifact(count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunContext.create(RunConfig(storage=StorageConfig(scratch=folder)))
        run.lengths.mkdir()
        predicted = draw(count, 1, ASSUMED, LONGEST, seed=0).predicted
        table = pa.table({"prompt_id": prompt_ids(count), "predicted": predicted})
        pq.write_table(table, run.lengths / "predictions.parquet")
        rows = []
        for name, call in (("make", lambda: make_schedule(run)), ("find again", lambda: make_schedule(run))):
            started = _now()
            call()
            rows.append(_row(f"artifact: {name}", started))
        started = _now()
        read_schedule(run.schedule / FILE)
        rows.append(_row("artifact: read", started))
    return rows


def _now() -> tuple[float, float]:
    """Wall clock and processor time."""
    return time.perf_counter(), time.process_time()


def _row(what: str, started: tuple[float, float]) -> Row:
    wall, cpu = (round(now - then, 3) for now, then in zip(_now(), started, strict=True))
    return {"what": what, "seconds": wall, "cpu_s": cpu, "peak_mb": _peak_mb()}


def _peak_mb() -> int:
    """Most resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


if __name__ == "__main__":
    main()
