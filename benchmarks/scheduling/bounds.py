"""Hard bounds on staleness, where the engines are the bottleneck.

    python -m benchmarks.scheduling.bounds [--seeds 3]

`tail_s` is the third bound on step time (`forebay.simulation.bound`): the longest response and one step have to fit
into bound + 1 versions. Groups that are too old are dropped, `retry` makes them again, `wait` (whole batches) keeps a
place for what would be too old for the next version. Dropping trains fewer long responses: `trained_tokens` is a
trained batch's tokens over an average one's, and `over_bound` is of the trained ones.
"""

from dataclasses import replace
from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.drawing import BLUE, GREEN, GREY, INK, ORANGE, RED, panels, save
from benchmarks.scheduling.setting import arguments, measure, scenario
from forebay.simulation.bound import bound
from forebay.simulation.model import Scenario

BOUNDS = (1, 2, 3, 4, 6, 8)
REGIME = "rollout-bound"
KINDS = {
    "balanced": (),
    "fifo": ("schedule.policy=fifo",),
    "longest_first": ("schedule.policy=longest_first",),
    "no credits": ("control.work_in_progress=1000",),
    "retry": ("control.stale=retry",),
    "wait": ("training.streaming=false",),
}


def at(kind: str, limit: float, seed: int) -> Scenario:
    made = scenario(REGIME, (f"control.max_staleness={limit}", *KINDS[kind]), seed)
    return replace(made, rules=replace(made.rules, wait_for_oldest=True)) if kind == "wait" else made


def main() -> None:
    seeds, rows = arguments(__doc__, seeds=3).seeds, []
    for kind in KINDS:
        for limit in BOUNDS:
            made = [at(kind, limit, seed) for seed in range(seeds)]
            rows.append(measure({"what": kind, "bound": limit, "tail_s": bound(made[0]).tail_s}, made))
    draw(rows)
    report("scheduling_bounds", f"hard staleness bounds, {REGIME}, {seeds} seeds", rows, outcome(rows))


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Step time in seconds by kind and bound."""
    return {kind: {str(row["bound"]): row["step_time_s"] for row in rows if row["what"] == kind} for kind in KINDS}


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = panels(["Step time, s", "Mean staleness, versions", "Tokens of a trained batch over the data's"])
    for kind, colour in zip(KINDS, (BLUE, ORANGE, GREEN, INK, RED, GREY), strict=True):
        own = [row for row in rows if row["what"] == kind]
        limits = [row["bound"] for row in own]
        for ax, name in zip(axes, ("step_time_s", "lag_mean", "trained_tokens"), strict=True):
            ax.plot(limits, [row[name] for row in own], color=colour, marker="o", ms=4, label=kind)
    first = [row for row in rows if row["what"] == "balanced"]
    axes[0].plot(BOUNDS, [row["tail_s"] for row in first], color="black", ls=":", label="third bound")
    axes[0].legend(fontsize=8, frameon=False)
    for ax in axes:
        ax.set_xlabel("hard bound, versions", fontsize=9)
        ax.set_ylim(0)
    save(figure, "bounds")


if __name__ == "__main__":
    main()
