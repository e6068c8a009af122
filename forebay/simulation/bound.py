"""Speed of light of a run: no schedule of the same work can need less time per step.

    T* = max( T_train, B n E[L] tau(N*) / (G N*) + prefill + pause ),   tau(N) = a + b N + c N ctx
    ctx = p + E[L^2] / (2 E[L])          mean context of a response while it is decoded
    N* = min(slots, KV capacity / ctx)   responses decoded at a time

for B groups of n responses a step, G engines, prompts of p tokens (a prompt is computed once for its group). Scheduling
moves neither term; an engine that skips versions pauses less often than once for each, which a simulation tells. A
third one holds for runs with a hard staleness bound in which some response in every window of versions is as long as
the longest: that response and one step must fit into (bound + 1) versions. It is given beside, not part of the maximum.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.simulation.model import EngineModel, Scenario, TrainerModel, Workload


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks for, on the average."""

    generated: float
    """Groups generated for it, those included that teach nothing."""
    trained: float
    """Groups trained."""
    group_size: int
    length: float
    """Mean response length."""
    square_length: float
    """Mean of the squared lengths."""
    prompt_tokens: float
    longest: int
    """Longest response."""
    refreshes: float | None = None
    """Of each engine; None: one for every version."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds per step."""

    train_s: float
    rollout_s: float
    tail_s: float | None
    """Of the longest response; None without a hard staleness bound."""

    @property
    def step_time_s(self) -> float:
        return max(self.train_s, self.rollout_s)

    @property
    def binding(self) -> Literal["train", "rollout"]:
        return "train" if self.train_s >= self.rollout_s else "rollout"


def bound(scenario: Scenario) -> Bound:
    """By the scenario's whole workload, every prompt equally often."""
    rules = scenario.rules
    refilled = 1 / scenario.teaching if rules.dynamic_sampling else 1.0
    teaching = 1.0 if rules.dynamic_sampling else scenario.teaching
    return bound_of(scenario, work_of(scenario.workload, rules.batch_groups * refilled, rules.batch_groups * teaching))


def work_of(workload: Workload, generated: float, trained: float) -> Work:
    """So many groups a step, with the mean lengths of the workload."""
    lengths = workload.lengths.astype(np.float64)
    return Work(
        generated=generated,
        trained=trained,
        group_size=workload.lengths.shape[1],
        length=float(lengths.mean()),
        square_length=float((lengths**2).mean()),
        prompt_tokens=float(workload.prompt_tokens.mean()),
        longest=int(workload.lengths.max()),
    )


def bound_of(scenario: Scenario, work: Work) -> Bound:
    """For this much work a step."""
    sync_every, staleness = scenario.rules.sync_every, scenario.rules.max_staleness
    train_s = _train_s(scenario.trainer, work, sync_every)
    refreshes = 1 / sync_every if work.refreshes is None else min(work.refreshes, 1 / sync_every)
    pause_s = scenario.engine.pause_s * refreshes
    rollout_s = _rollout_s(scenario.engine, work) / scenario.engines + pause_s
    tail_s = None
    if math.isfinite(staleness):
        tail_s = (_alone_s(scenario.engine, work) + train_s) / ((math.ceil(staleness) + 1) * sync_every)
    return Bound(train_s, rollout_s, tail_s)


def _train_s(trainer: TrainerModel, work: Work, sync_every: int) -> float:
    tokens = work.trained * work.group_size * (work.length + work.prompt_tokens)
    return trainer.fixed_s + trainer.per_token_s * tokens + trainer.publish_s / sync_every


def _rollout_s(engine: EngineModel, work: Work) -> float:
    """Of one engine that does it all."""
    context = work.prompt_tokens + work.square_length / (2 * work.length)
    active = min(float(engine.slots), engine.kv_tokens / context)
    step_s = engine.a + engine.b * active + engine.c * active * context
    decode_s = work.generated * work.group_size * work.length * step_s / active
    return decode_s + work.generated * work.prompt_tokens * engine.prefill_s


def _alone_s(engine: EngineModel, work: Work) -> float:
    """The longest response, alone on an engine."""
    tokens, context = work.longest, work.prompt_tokens
    steps = engine.a + engine.b + engine.c * (context + (tokens - 1) / 2)
    return tokens * steps + context * engine.prefill_s
