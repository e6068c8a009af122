"""Staleness against speed as the work in progress varies.

    python -m benchmarks.scheduling.work_in_progress [--seeds 3]

Fixed credits, for a trainer that takes groups as they come and for one that waits for whole batches; automatic credits;
and no credits, with the queue's high mark as the only throttle.
"""

from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.drawing import BLUE, GREEN, ORANGE, RED, panels, save
from benchmarks.scheduling.setting import REGIMES, WATERMARK, arguments, measure, scenario

CREDITS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
HIGH_MARKS = (1.0, 1.5, 2.0, 3.0)
TRAINERS = {"streaming": "training.streaming=true", "whole batches": "training.streaming=false"}


def variants() -> list[tuple[str, float | str, tuple[str, ...]]]:
    """(kind, value, changes)"""
    fixed = [
        (kind, credits, (f"control.work_in_progress={credits}", trainer))
        for kind, trainer in TRAINERS.items()
        for credits in CREDITS
    ]
    auto = [(kind, "auto", (trainer,)) for kind, trainer in TRAINERS.items()]
    marks = [
        (
            "watermark",
            mark,
            ("schedule.policy=fifo", "training.streaming=false", *WATERMARK, f"control.queue.high={mark}"),
        )
        for mark in HIGH_MARKS
    ]
    return [*fixed, *auto, *marks]


def main() -> None:
    seeds = arguments(__doc__, seeds=3).seeds
    rows = [
        measure(
            {"regime": regime, "what": kind, "batches": value},
            [scenario(regime, changes, seed, plain=kind == "watermark") for seed in range(seeds)],
        )
        for regime in REGIMES
        for kind, value, changes in variants()
    ]
    draw(rows)
    report("scheduling_work_in_progress", f"work in progress, {seeds} seeds", rows, outcome(rows))


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By regime: the automatic credits of a streaming trainer."""
    return {
        row["regime"]: {"over_bound": row["over_bound"], "lag_mean": row["lag_mean"]}
        for row in rows
        if (row["what"], row["batches"]) == ("streaming", "auto")
    }


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = panels(list(REGIMES), share_y=True)
    colours = {"streaming": BLUE, "whole batches": GREEN, "watermark": ORANGE}
    for ax, regime in zip(axes, REGIMES, strict=True):
        for kind, colour in colours.items():
            own = [r for r in rows if (r["regime"], r["what"]) == (regime, kind) and r["batches"] != "auto"]
            ax.plot(
                [r["lag_mean"] for r in own], [r["over_bound"] for r in own], color=colour, marker="o", ms=4, label=kind
            )
            for row in own:
                at_ = (row["lag_mean"], row["over_bound"])
                ax.annotate(f"{row['batches']:g}", at_, xytext=(3, 3), textcoords="offset points", fontsize=7)
        auto = [r for r in rows if (r["regime"], r["what"], r["batches"]) == (regime, "streaming", "auto")]
        ax.plot([auto[0]["lag_mean"]], [auto[0]["over_bound"]], color=RED, marker="*", ms=13, ls="", label="auto")
        ax.set_xlabel("mean staleness, versions", fontsize=9)
    axes[0].set_ylabel("step time over the bound", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    save(figure, "work_in_progress")


if __name__ == "__main__":
    main()
