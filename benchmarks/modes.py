"""`sync` against `fully_async` on the quickstart: the same data, start model, schedule and steps, in one run.

    python -m benchmarks.modes [--steps 40] [--rounds 2]

Each mode runs `rounds` times in turn (sync, async, sync, async, ...), so that a slow minute of the machine hits both.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import report
from forebay.config import load_profile
from forebay.data.prepare import prepare_data
from forebay.lengths.stage import predict_lengths
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from forebay.train import TrainResult, train

MODES = ("sync", "fully_async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="profiles/quickstart_cpu.yaml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compare(args.profile, args.steps, args.rounds, Path(scratch))


def compare(profile: str, steps: int, rounds: int, scratch: Path) -> None:
    def context(mode: str) -> RunContext:
        overrides = [f"mode={mode}", f"training.steps={steps}", f"storage.scratch={scratch}"]
        return RunContext.create(load_profile(profile, overrides))

    base = context("fully_async")
    prepare_data(base)
    predict_lengths(base)
    make_schedule(base)
    rows = []
    for turn in range(rounds):
        for mode in MODES:
            run = context(mode)
            for folder in ("data", "start_model", "lengths", "schedule"):
                shutil.copytree(base.root / folder, run.root / folder)
            rows.append({"mode": mode, "round": turn, **_row(train(run, lambda record: None))})
    medians = {mode: statistics.median(row["step_time_s"] for row in rows if row["mode"] == mode) for mode in MODES}
    report(
        "modes",
        f"{profile}: {steps} steps, {rounds} rounds",
        rows,
        {
            "sync_step_time_s": medians["sync"],
            "fully_async_step_time_s": medians["fully_async"],
            "sync_over_fully_async": medians["sync"] / medians["fully_async"],
        },
    )


def _row(result: TrainResult) -> dict[str, Any]:
    return {
        "step_time_s": statistics.median(result.step_times),
        "mean_step_time_s": statistics.fmean(result.step_times),
        "train_wait_ratio": sum(result.train_waits) / sum(result.step_times),
        "tokens_per_s": result.tokens_per_s,
        "staleness_mean": result.staleness_mean,
        "staleness_max": result.staleness_max,
        "staleness_bound": result.staleness_bound,
        "refresh_pause_s": result.refresh_pause_s,
        **{fate: count for fate, count in result.fates.items() if fate != "in_flight"},
    }


if __name__ == "__main__":
    main()
