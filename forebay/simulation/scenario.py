"""From a profile to a scenario: what the profile says, what a calibration has measured, and assumptions for the rest.

Invariants: rules and order are made by the same functions as in a run; what is assumed is told (`assumptions`).
"""

import math
from dataclasses import replace
from pathlib import Path

from forebay.config import RunConfig
from forebay.config.sections import AssumedLengthsConfig
from forebay.control.rules import Credits, Rules, rules_of
from forebay.errors import UserError
from forebay.memory.engines import engine_devices
from forebay.scheduling.policies import order_prompts, sorted_steps
from forebay.simulation.calibrate import Calibration
from forebay.simulation.kv import capacity, token_bytes
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, Workload, lognormal

ENGINE = EngineModel(a=0.008, b=5e-5, c=4.5e-8, slots=1, prefill_s=2e-5, pause_s=1.5)
"""Without a calibration: about a model of 7 billion parameters on one recent GPU (the scheduling study's)."""
TRAINER = TrainerModel(fixed_s=1.0, per_token_s=2e-5, publish_s=0.0)
WARM_UP, FEWEST_STEPS = 10, 12
"""Steps left out, or a third of a short simulation, but no less than those of the first wave; and fewest simulated."""
SPARE = 4
"""Prompts are drawn for so many times the steps that are simulated."""


def scenario_of(
    config: RunConfig,
    calibration: Calibration | None = None,
    *,
    steps: int | None = None,
    prompts: int | None = None,
) -> Scenario:
    """The run that a profile describes.

    `steps`: instead of training.steps; too few are refused. Of a profile with too few, `fewest_steps` are simulated.
    `prompts`: most prompts to draw lengths for (default: enough for the steps). Raises `UserError`.
    """
    if config.control.batch_groups > config.data.train_prompts:
        raise UserError(
            f"control.batch_groups ({config.control.batch_groups}) is more than data.train_prompts "
            f"({config.data.train_prompts}): a batch would hold the same prompt twice; lower it or raise the other"
        )
    rules, fewest = rules_of(config), fewest_steps(config)
    if steps is not None and steps < fewest:
        raise UserError(f"simulation: {steps} steps are too few for a steady pace here: simulate {fewest} or more")
    rules = replace(rules, steps=max(rules.steps, fewest) if steps is None else steps)
    limit = SPARE * rules.steps * rules.batch_groups if prompts is None else prompts
    workload = _workload(config, calibration, limit)
    engine, trainer = ENGINE, TRAINER
    if calibration is not None:
        costs = calibration.engine
        engine = replace(ENGINE, a=costs.a, b=costs.b, c=costs.c, prefill_s=costs.prefill_s, pause_s=costs.pause_s)
        trainer = calibration.trainer
    return Scenario(
        rules=rules,
        streaming=config.streaming,
        engines=config.generation.engines,
        engine=replace(engine, slots=config.generation.max_num_seqs, kv_tokens=kv_tokens(config, calibration)),
        trainer=trainer,
        workload=workload,
        order=order_prompts(
            workload.predicted,
            workload.prompt_tokens,
            config.schedule,
            config.schedule_mode,
            config.control.batch_groups,
            config.seed,
        ),
        sorted_steps=sorted_steps(config.schedule, config.schedule_mode, config.control.batch_groups),
        seed=config.seed,
        reward_s=calibration.reward_s + calibration.engine.latency_s if calibration else 0.0,
        refresh_s=calibration.refresh_s if calibration else 0.0,
        first_wave_s=config.control.first_wave_s,
        group_deadline_s=config.control.group_deadline_s,
        warm_up=max(min(WARM_UP, rules.steps // 3), first_wave(rules, config.streaming, config.generation.engines)),
        teaching=calibration.teaching if calibration else 1.0,
    )


def fewest_steps(config: RunConfig) -> int:
    """Steps that show a steady pace: what the first wave brings is trained at once, faster than it can be generated,
    and afterwards steps are fast and slow in turn, as often as there are batches on their way."""
    return max(FEWEST_STEPS, 3 * first_wave(rules_of(config), config.streaming, config.generation.engines))


def first_wave(rules: Rules, streaming: bool, engines: int) -> int:
    """Steps whose groups start before anything is trained."""
    credits = Credits(rules, streaming)
    credits.engines(engines)
    return math.ceil(min(credits.batches * rules.over_sampling, (rules.max_staleness + 1) * rules.sync_every))


def kv_tokens(config: RunConfig, calibration: Calibration | None) -> float:
    """KV capacity of one engine; infinite if neither the calibration nor the model tells the size of a token."""
    known = calibration.kv_token_bytes if calibration else token_bytes(Path(config.model.path), config.model.dtype)
    # The cache's size is that on each device, which holds a part of every token.
    return capacity(config.generation.kv_cache, known) * engine_devices(config)


def assumptions(config: RunConfig, calibration: Calibration | None, steps: int | None = None) -> list[str]:
    """What a scenario of this profile takes for granted, one line each; empty if everything was measured or given.
    `steps`: as for `scenario_of`."""
    lines = []
    if steps is None and config.training.steps < fewest_steps(config):
        lines.append(
            f"training goes on for {fewest_steps(config)} steps: the {config.training.steps} of training.steps are too "
            "few for a steady pace"
        )
    if calibration is None:
        lines.append(
            f"decode step {1e3 * ENGINE.a:g} ms + {1e6 * ENGINE.b:g} us a response + {1e9 * ENGINE.c:g} ns a KV token, "
            f"prefill {1e6 * ENGINE.prefill_s:g} us a token, pause {ENGINE.pause_s:g} s a refresh"
        )
        lines.append(f"training {TRAINER.fixed_s:g} s + {1e6 * TRAINER.per_token_s:g} us a token; rewards take no time")
        assumed = config.lengths.assumed
        if assumed is None:
            own = _assumed(config)
            lines.append(f"log-normal response lengths of median {own.median:g} (lengths.assumed says others)")
    if math.isinf(kv_tokens(config, calibration)):
        lines.append("the KV cache is never full (the size of a token in it is not known)")
    return lines


def _workload(config: RunConfig, calibration: Calibration | None, limit: int) -> Workload:
    size = config.generation.group_size
    if calibration is not None:
        measured = calibration.workload
        if measured.lengths.shape[1] != size:
            raise UserError(
                f"the calibration is of groups of {measured.lengths.shape[1]}, the profile has generation.group_size "
                f"{size}: calibrate from a run with that group size"
            )
        return measured
    count = min(config.data.train_prompts, limit)
    return lognormal(count, size, _assumed(config), config.generation.max_new_tokens, config.seed)


def _assumed(config: RunConfig) -> AssumedLengthsConfig:
    """The profile's, or one that fits its budget: a fifth of it is the median."""
    if config.lengths.assumed is not None:
        return config.lengths.assumed
    budget, room = config.generation.max_new_tokens, config.model.max_model_len - config.generation.max_new_tokens
    usual = AssumedLengthsConfig()
    prompt = min(usual.prompt_tokens, room)
    return usual.model_copy(update={"median": max(min(usual.median, budget / 5), 1.0), "prompt_tokens": prompt})
