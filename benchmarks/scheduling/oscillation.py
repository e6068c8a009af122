"""Why steps alternate between fast and slow ones, what stops that, and what makes them faster.

    python -m benchmarks.scheduling.oscillation

The loop of the sources (vime's, setup 1): 8 groups of 4 responses a step, answers of equal length (cut at 1,024
tokens), one engine that generates `pool` batches at a time whatever the trainer does, a trainer that needs 8.9 s and
2.9 s to hand its weights over. There the steps alternated between 12 and 30 s. The decode step is chosen so that a
response takes about as long as it did there, so the pattern is evidence, the seconds are not.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.results import report
from benchmarks.scheduling.drawing import BLUE, GREEN, ORANGE, RED, panels, save
from benchmarks.scheduling.setting import arguments, means, profile
from forebay.control.rules import rules_of
from forebay.scheduling.policies import order_prompts
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, lognormal
from forebay.simulation.run import simulate

ENGINE = EngineModel(a=0.0295, b=6e-5, c=4.5e-8, slots=512, prefill_s=1e-5, pause_s=2.9)
TRAINER = TrainerModel(fixed_s=8.9, per_token_s=0.0, publish_s=2.9)
RESIDENCE_S = 36.0
BATCH, GROUP = 8, 4
EQUAL = ("lengths.assumed.prompt_sd=0", "lengths.assumed.within_sd=0", "lengths.assumed.median=1024")
SPREAD = ("lengths.assumed.median=1100",)
SHOWN = 24
"""Steps in the figure."""


@dataclass(frozen=True)
class Variant:
    """`pool`: batches generated at a time. `credits`: batches outstanding at a time; None: two more than the pool."""

    name: str
    pool: int
    staggered: bool = False
    lengths: tuple[str, ...] = EQUAL
    credits: float | None = None
    engine: EngineModel = ENGINE

    def scenario(self) -> Scenario:
        credits = self.pool + 2 if self.credits is None else self.credits
        # The pool is let out over one residence time, so all the credits over as much more.
        first_wave_s = RESIDENCE_S * credits / self.pool if self.staggered else 0.0
        config = profile(
            (
                "schedule.policy=fifo",
                "schedule.minibatch_prompts=4",
                "schedule.minibatch_slack=0",
                "generation.engines=1",
                f"generation.group_size={GROUP}",
                "generation.max_new_tokens=1024",
                f"generation.max_num_seqs={self.pool * BATCH * GROUP}",
                f"control.batch_groups={BATCH}",
                f"control.work_in_progress={credits}",
                "control.max_staleness=1000",
                f"control.first_wave_s={first_wave_s}",
                "training.streaming=false",
                *self.lengths,
            )
        )
        assert config.lengths.assumed is not None
        work = lognormal(config.training.steps * BATCH, GROUP, config.lengths.assumed, 1024, seed=5)
        return Scenario(
            rules=replace(rules_of(config), queue_low=0.0),
            streaming=config.streaming,
            engines=1,
            engine=replace(self.engine, slots=config.generation.max_num_seqs),
            trainer=TRAINER,
            workload=work,
            order=order_prompts(work.predicted, None, config.schedule, config.mode, BATCH, 0),
            first_wave_s=config.control.first_wave_s,
        )


SOURCE = Variant("pool 2, all at once (the sources)", 2)
STAGGERED = Variant("pool 2, staggered", 2, staggered=True)
VARIANTS = (
    SOURCE,
    STAGGERED,
    Variant("pool 2, lengths differ", 2, lengths=SPREAD),
    Variant("pool 2, all at once, credits 3", 2, credits=3),
    Variant("pool 1, all at once", 1),
    Variant("pool 3, all at once", 3),
    Variant("pool 3, staggered", 3, staggered=True),
    Variant("pool 4, staggered", 4, staggered=True),
    Variant("pool 8, staggered", 8, staggered=True),
    Variant("pool 2, staggered, decoding twice as fast", 2, staggered=True, engine=replace(ENGINE, a=0.0138)),
)


def main() -> None:
    arguments(__doc__, seeds=1)
    rows, times = [], {}
    for variant in VARIANTS:
        result = simulate(variant.scenario())
        times[variant.name] = result.step_times
        own = means([result])
        first = " ".join(f"{seconds:.0f}" for seconds in result.step_times[:6])
        kept = {name: own[name] for name in ("step_time_s", "step_sd_s", "train_wait", "lag_mean", "lag_max")}
        rows.append({"what": variant.name, "steps_s": first, **kept})
    draw(times)
    report("scheduling_oscillation", "depth-1 oscillation", rows, outcome(rows))


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation of the step time by variant."""
    return {row["what"]: {"step_time_s": row["step_time_s"], "step_sd_s": row["step_sd_s"]} for row in rows}


def draw(times: dict[str, np.ndarray[Any, np.dtype[np.float64]]]) -> None:
    figure, axes = panels(["What alternates, and what does not", "What moves the mean"], share_y=True)
    wide, quick = "pool 4, staggered", "pool 2, staggered, decoding twice as fast"
    colours = {SOURCE.name: ORANGE, STAGGERED.name: BLUE, wide: GREEN, quick: RED}
    for ax, names in zip(axes, ((SOURCE.name, STAGGERED.name), (STAGGERED.name, wide, quick)), strict=True):
        for name in names:
            ax.plot(times[name][:SHOWN], color=colours[name], marker="o", ms=3, label=name)
        ax.set_xlabel("step", fontsize=9)
        ax.set_ylim(0, 44)
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    axes[0].set_ylabel("step time, s", fontsize=9)
    save(figure, "oscillation")


if __name__ == "__main__":
    main()
