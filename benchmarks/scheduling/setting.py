"""The fleet and the work of the scheduling studies, and how a variant of them is simulated.

Every variant is a profile (`study.yaml` with changes, as for `forebay run --set`), so the studies measure the very
rules and policies that a run has, with the defaults of its mode.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.config import RunConfig, load_profile
from forebay.control.rules import rules_of
from forebay.scheduling.policies import order_prompts
from forebay.simulation.bound import bound
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, Workload, lognormal
from forebay.simulation.run import SimulationResult, simulate

PROFILE = Path(__file__).with_name("study.yaml")
ENGINE = EngineModel(a=0.008, b=5e-5, c=4.5e-8, slots=64, prefill_s=2e-5, pause_s=1.5)
"""A decode step of a full engine takes 16.5 ms."""
OPTIMIZER_S = 1.0
"""Of a training step, what does not depend on tokens."""
REGIMES = {"rollout-bound": 0.5, "balanced": 1.0, "train-bound": 1.5}
"""Time that the trainer needs for a step over the time that the engines need, each working all the time."""
WARM_UP = 12
WATERMARK = ("control.work_in_progress=1000", "control.max_staleness=1000", "control.queue.high=2")
"""No credits and no bound: only the Training Queue's high mark, as in the systems that came before."""
BARRIER = ("schedule.minibatch_barrier=true", "training.streaming=false", *WATERMARK)
"""ASP as published: an engine gets a minibatch when it is done with the one before."""
PADDED = replace(ENGINE, padded=True)
"""Static batches."""


def arguments(text: str | None, seeds: int) -> argparse.Namespace:
    """Command line of a study."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    return parser.parse_args()


def profile(changes: Sequence[str] = ()) -> RunConfig:
    """The study's profile with changes (key=value)."""
    return load_profile(PROFILE, changes)


def scenario(
    regime: str | float,
    changes: Sequence[str] = (),
    seed: int = 0,
    engine: EngineModel = ENGINE,
    *,
    plain: bool = False,
    perfect: bool = False,
) -> Scenario:
    """`regime`: one of `REGIMES`, or the ratio itself. `plain`: the order is kept also when the queue runs low.
    `perfect`: the predictor knows each group's own mean length."""
    config = profile(changes)
    work, rules = workload(config, seed, perfect), rules_of(config)
    if config.mode != "fully_async":
        rules = replace(rules, refresh_all=True)  # all wait anyway
    if plain:
        rules = replace(rules, queue_low=0.0)
    made = Scenario(
        rules=rules,
        streaming=config.streaming,
        engines=config.generation.engines,
        engine=replace(engine, slots=config.generation.max_num_seqs),
        trainer=TrainerModel(OPTIMIZER_S, 0.0),
        workload=work,
        order=order_prompts(work.predicted, None, config.schedule, config.mode, rules.batch_groups, seed),
        seed=seed,
        first_wave_s=config.control.first_wave_s,
        warm_up=min(WARM_UP, rules.steps // 3),
    )
    return replace(made, trainer=trainer(made, REGIMES[regime] if isinstance(regime, str) else regime))


def workload(config: RunConfig, seed: int, perfect: bool = False) -> Workload:
    """As many prompts as the steps train, so that a run is one epoch."""
    assumed, prompts = config.lengths.assumed, config.training.steps * config.control.batch_groups
    assert assumed is not None
    made = lognormal(prompts, config.generation.group_size, assumed, config.generation.max_new_tokens, seed)
    return replace(made, predicted=made.lengths.mean(axis=1)) if perfect else made


def trainer(scenario: Scenario, ratio: float) -> TrainerModel:
    """One that needs `ratio` times the engines' time for a step; a token's part of it is so large."""
    work = scenario.workload
    group_tokens = float((work.lengths + work.prompt_tokens[:, None]).sum(axis=1).mean())
    seconds = ratio * bound(scenario).rollout_s - OPTIMIZER_S
    return TrainerModel(OPTIMIZER_S, seconds / (scenario.rules.batch_groups * group_tokens))


def measure(name: dict[str, Any], scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """One row of a study: the means over scenarios that differ by seed only."""
    results = [simulate(one) for one in scenarios]
    trained = [trained_share(one, result) for one, result in zip(scenarios, results, strict=True)]
    return name | means(results) | {"trained_tokens": statistics.fmean(trained)}


def trained_share(scenario: Scenario, result: SimulationResult) -> float:
    """Tokens of a trained batch over those of an average one of the data: below 1, long responses are left out."""
    fixed = scenario.trainer.fixed_s
    return (result.bound.train_s - fixed) / (bound(scenario).train_s - fixed)


def means(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """What the studies compare. Times in seconds, shares 0..1, staleness in versions."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    return {
        "step_time_s": mean([r.step_time_s for r in results]),
        "over_bound": mean([r.over_bound for r in results]),
        "over_bound_sd": statistics.pstdev([r.over_bound for r in results]),
        "step_sd_s": mean([r.step_time_sd for r in results]),
        "train_wait": mean([r.train_wait_ratio for r in results]),
        "slots_idle": mean([r.slots_idle for r in results]),
        "queue_sd": mean([r.queue_sd for r in results]),
        "lag_mean": mean([r.staleness.mean for r in results]),
        "lag_p95": mean([r.staleness.p95 for r in results]),
        "lag_max": max(r.staleness.max for r in results),
        "token_lag": mean([r.token_staleness.mean for r in results]),
        "stale_share": mean([r.fates.get("stale", 0) / r.fates["trained"] for r in results]),
    }
