"""Whether the simulator is right, and how fast: a real training, and a simulation of it that is calibrated from it.

    python -m benchmarks.simulation [--steps 60] [--rounds 1] [--run FOLDER]

Each round runs the stages up to training of the profile for real, takes costs and response lengths from its records
(`forebay simulate --calibrate` does the same), plays the profile on virtual engines and compares step time and the
trainer's wait. `--run` compares with a run that is there instead. The errors are relative, the largest of the rounds;
the bar is 15%.

Then the speed, on one core: 64 engines x 256 slots x 200 steps of 2,048 groups of 8 responses, streaming, training and
generation balanced. `large_s` is wall time, `large_cpu_s` processor time (for a machine that others use too); the bar
is 60 s.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import report
from forebay.config import RunConfig, load_profile
from forebay.config.sections import AssumedLengthsConfig
from forebay.control.rules import Rules
from forebay.data.prepare import prepare_data
from forebay.lengths.stage import predict_lengths
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from forebay.simulation.bound import bound
from forebay.simulation.calibrate import calibrate
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, lognormal
from forebay.simulation.report import deviation
from forebay.simulation.run import simulate
from forebay.simulation.scenario import scenario_of
from forebay.train import train

GROUP_SIZE = 8
LONGEST = 8192
PROMPTS = 32_768
TRAIN_OVER_ROLLOUT = 0.95
"""Time of a training step over that of its generation, in the large scenario."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="profiles/quickstart_cpu.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a run of the profile that is there already")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--engines", type=int, default=64, help="of the large scenario")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--large-steps", type=int, default=200)
    args = parser.parse_args()
    config = load_profile(args.profile, [*args.set, f"training.steps={args.steps}"])
    folders = [args.run] if args.run else (trained(config) for _ in range(args.rounds))
    rows = [row for folder in folders for row in compare(config, folder)]
    large = measure_speed(large_scenario(args.engines, args.slots, args.large_steps))
    title = f"{args.profile}, {args.steps} steps: measured and simulated"
    report("simulation", title, rows, outcome(rows) | large)


def trained(config: RunConfig) -> Path:
    """Run the profile up to the end of training; its folder."""
    run = RunContext.create(config)
    prepare_data(run)
    predict_lengths(run)
    make_schedule(run)
    train(run, lambda record: None)
    return run.root


def compare(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """One row for each quantity of a run and its simulation. Seconds."""
    found = calibrate(folder)
    result = simulate(scenario_of(config, found))
    measured, wait_s = found.measured, result.train_wait_ratio * result.step_time_s
    pairs = {
        "step_time_s": (measured.step_time_s, result.step_time_s),
        "train_wait_s": (measured.train_wait_ratio * measured.step_time_s, wait_s),
        "tokens_per_s": (measured.tokens_per_s, result.tokens_per_s),
    }
    return [
        {
            "run": found.run,
            "what": name,
            "measured": was,
            "simulated": is_,
            "error": deviation(is_, was),
            "fit_error": found.engine.error,
        }
        for name, (was, is_) in pairs.items()
    ]


def outcome(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The largest errors."""

    def largest(what: str) -> float:
        return max(abs(float(row["error"])) for row in rows if row["what"] == what)

    return {"step_time_error": largest("step_time_s"), "train_wait_error": largest("train_wait_s")}


def large_scenario(engines: int, slots: int, steps: int) -> Scenario:
    """As many responses in a batch as there are slots; prompts in the order of a run."""
    groups = max(1, engines * slots // GROUP_SIZE)
    workload = lognormal(PROMPTS, GROUP_SIZE, AssumedLengthsConfig(), LONGEST, 0)
    rules = Rules(
        steps=steps,
        batch_groups=groups,
        group_size=GROUP_SIZE,
        sync_every=1,
        max_staleness=4,
        work_in_progress=None,
        max_concurrent_samples=slots,
        max_new_tokens=LONGEST,
        refresh="in_place",
        refresh_all=True,  # one after another, 64 pauses would take as long as a step
    )
    scenario = Scenario(
        rules=rules,
        streaming=True,
        engines=engines,
        engine=EngineModel(a=0.008, b=5e-5, c=4.5e-8, slots=slots, prefill_s=2e-5, pause_s=1.5),
        trainer=TrainerModel(1.0, 0.0),
        workload=workload,
        order=[[list(range(first, first + 16))] for first in range(0, PROMPTS, 16)],
        warm_up=min(10, steps // 3),
    )
    tokens = groups * GROUP_SIZE * float(workload.lengths.mean() + workload.prompt_tokens.mean())
    per_token_s = max(TRAIN_OVER_ROLLOUT * bound(scenario).rollout_s - 1.0, 0.0) / tokens
    return replace(scenario, trainer=TrainerModel(1.0, per_token_s))


def measure_speed(scenario: Scenario) -> dict[str, Any]:
    """How long a simulation takes, and what it says."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(scenario)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    responses = (result.fates["admitted"] - result.fates["in_flight"]) * scenario.rules.group_size
    return {
        "large_s": wall,
        "large_cpu_s": cpu,
        "large_us_per_response": 1e6 * cpu / responses,
        "large_engines": scenario.engines,
        "large_slots": scenario.engine.slots,
        "large_steps": scenario.rules.steps,
        "large_over_bound": result.over_bound,
    }


if __name__ == "__main__":
    main()
