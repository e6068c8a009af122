"""How well the predictors tell response lengths: rank correlation, error and coverage on held-out prompts, and seconds.

    python -m benchmarks.lengths [--profile P] [--seeds 0 1 2] [--history LEDGER] [--set KEY=VALUE]

For each seed the profile's data and start model are made once and the start model is profiled once (the answers come
from the cache afterwards). `history` is judged with the ledger of a training run on the same data, which is made unless
one is given; its lengths are those of a policy that changed as it was trained. `features` stands there twice: with the
start model's greedy responses and without.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import report
from forebay.config import load_profile
from forebay.data.prepare import prepare_data
from forebay.lengths.stage import LengthsResult, predict_lengths
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from forebay.train import train

PREDICTORS = ("features", "features_prompt_only", "hidden_state", "length_lm", "history")
NUMBERS = ("spearman", "kendall", "ceiling", "share", "mae", "coverage", "median_coverage")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="profiles/quickstart_cpu.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--history", help="ledger.parquet of an earlier run with the same data (one seed)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.history and len(args.seeds) > 1:
        parser.error("--history goes with one seed")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            rows += measure(args.profile, [*args.set, f"seed={seed}"], args.history, Path(folder) / str(seed))
            for row in rows[-len(PREDICTORS) :]:
                row["seed"] = seed
    report("lengths", f"{args.profile}: {rows[0]['profiled']} profiled prompts", rows, outcome(rows))


def measure(profile: str, overrides: Sequence[str], history: str | None, scratch: Path) -> list[dict[str, Any]]:
    """One row for each of `PREDICTORS`."""
    share_cache(load_profile(profile).storage.scratch, scratch)

    def context(*more: str) -> RunContext:
        return RunContext.create(load_profile(profile, [*overrides, *more, f"storage.scratch={scratch}"]))

    base = context()
    prepare_data(base)
    predict_lengths(base)  # fills the cache, so that every predictor is timed without the engines
    if history is None:
        make_schedule(base)
        train(base, lambda record: None)
        history = str(base.root / "ledger.parquet")
    rows = []
    for name in PREDICTORS:
        predictor = name.removesuffix("_prompt_only")
        more = [f"lengths.history={history}"] if predictor == "history" else []
        more += ["lengths.greedy=never"] if name != predictor else []
        run = context(f"lengths.predictor={predictor}", *more)
        for part in ("data", "start_model"):
            shutil.copytree(base.root / part, run.root / part)
        started = time.monotonic()
        result = predict_lengths(run)
        rows.append(row_of(name, result, time.monotonic() - started))
    return rows


def row_of(name: str, result: LengthsResult, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"predictor": name, "profiled": result.profiled, "held_out": result.held_out}
    return row | {key: getattr(result, key) for key in NUMBERS} | {"seconds": seconds}


def outcome(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, by predictor, and the share of the ceiling that the profile's default reaches; a predictor
    that ranks nothing counts as 0."""
    means = {
        name: {
            key: statistics.fmean(row[key] or 0.0 for row in rows if row["predictor"] == name)
            for key in ("spearman", "kendall", "ceiling", "share", "mae", "coverage", "seconds")
        }
        for name in PREDICTORS
    }
    return {"share_of_ceiling": means["features"]["share"], "predictors": means}


def share_cache(usual: str, scratch: Path) -> None:
    """Let the start model and its answers come from the cache of ordinary runs, and stay there."""
    cache = Path(usual).resolve() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "cache").symlink_to(cache)


if __name__ == "__main__":
    main()
