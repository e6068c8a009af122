"""What a better length predictor is worth, by what its predictions are used for.

    python -m benchmarks.scheduling.predictors [--seeds 3]

Engines are the bottleneck. Quality is the rank correlation between predicted and expected length of a prompt: 0 is
random order, 1 knows each prompt's expected length, `perfect` the mean length that its group will have. `4 waves`:
batches of four times as many responses as there are slots, so that the order decides what starts late.
"""

from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.drawing import BLUE, GREEN, GREY, ORANGE, RED, panels, save
from benchmarks.scheduling.setting import BARRIER, ENGINE, PADDED, arguments, measure, scenario
from forebay.simulation.model import EngineModel, Scenario

QUALITIES = ("0", "0.6", "0.8", "0.95", "1", "perfect")
WAVES = ("control.batch_groups=256", "training.steps=24")
REGIME = "rollout-bound"
USES: dict[str, tuple[tuple[str, ...], EngineModel]] = {
    "asp, padded": (("schedule.policy=asp", *BARRIER), PADDED),
    "asp, barrier": (("schedule.policy=asp", *BARRIER), ENGINE),
    "sync, longest_first": (("mode=sync",), ENGINE),
    "sync, longest_first, 4 waves": (("mode=sync", *WAVES), ENGINE),
    "one_step_off, longest_first": (("mode=one_step_off",), ENGINE),
    "one_step_off, longest_first, 4 waves": (("mode=one_step_off", *WAVES), ENGINE),
    "fully_async, balanced": ((), ENGINE),
}
STYLES = ((RED, "-"), (GREY, "-"), (ORANGE, "-"), (ORANGE, "--"), (GREEN, "-"), (GREEN, "--"), (BLUE, "-"))


def at(use: str, quality: str, seed: int) -> Scenario:
    changes, engine = USES[use]
    perfect = quality == "perfect"
    known = "1" if perfect else quality
    return scenario(REGIME, (f"lengths.assumed.rank_correlation={known}", *changes), seed, engine, perfect=perfect)


def main() -> None:
    seeds = arguments(__doc__, seeds=3).seeds
    rows = [
        measure({"what": use, "rank_correlation": quality}, [at(use, quality, seed) for seed in range(seeds)])
        for use in USES
        for quality in QUALITIES
    ]
    draw(rows)
    report("scheduling_predictors", f"quality of the predictor, {REGIME}, {seeds} seeds", rows, outcome(rows))


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Step time in seconds by use and quality."""
    return {use: {r["rank_correlation"]: r["step_time_s"] for r in rows if r["what"] == use} for use in USES}


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = panels(["Step time over the bound", "Deviation of step times, s"])
    for use, (colour, style) in zip(USES, STYLES, strict=True):
        own = [row for row in rows if row["what"] == use]
        for ax, name in zip(axes, ("over_bound", "step_sd_s"), strict=True):
            ax.plot(QUALITIES, [row[name] for row in own], color=colour, ls=style, marker="o", ms=4, label=use)
    for ax in axes:
        ax.set_xlabel("rank correlation of the predictor", fontsize=9)
        ax.set_ylim(0)
    axes[0].legend(fontsize=7, frameon=False, loc="upper right")
    axes[0].set_ylim(0, 6)
    save(figure, "predictors")


if __name__ == "__main__":
    main()
