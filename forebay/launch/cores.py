"""Which cores each process runs on.

Invariant: the trainer and the engines share no core as long as there are two.
"""

import itertools
import os
from dataclasses import dataclass

from forebay.config import RunConfig


@dataclass(frozen=True)
class CorePlan:
    """Cores for each process; None leaves it to the operating system."""

    engines: list[list[int] | None]
    trainer: list[int] | None


def plan_cores(config: RunConfig) -> CorePlan:
    """Share out this process's cores (`sched_getaffinity`): the trainer takes the last ones, the engines the others.

    `launch.trainer_cores` 0: in proportion to the number of processes. More engines than cores: they take turns.
    """
    engines = config.generation.engines
    if not config.launch.pin:
        return CorePlan([None] * engines, None)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        return CorePlan([list(cores) for _ in range(engines)], list(cores))
    ranks = config.training.ranks
    wanted = config.launch.trainer_cores or len(cores) * ranks // (engines + ranks)
    split = len(cores) - min(max(wanted, 1), len(cores) - 1)
    shared, trainer = cores[:split], cores[split:]
    if engines >= len(shared):
        return CorePlan([[shared[i % len(shared)]] for i in range(engines)], trainer)
    bounds = [i * len(shared) // engines for i in range(engines + 1)]
    return CorePlan([shared[a:b] for a, b in itertools.pairwise(bounds)], trainer)
