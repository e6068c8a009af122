"""Every mode with every policy, where the engines, nobody, or the trainer is the bottleneck.

    python -m benchmarks.scheduling.regimes [--seeds 5]

`over_bound` is step time over max(train, rollout), what engines and trainer would need if neither ever waited. The
first rows have a barrier for every minibatch, as ASP was published: `padded` with static batches, whose finished
responses keep their slots, `barrier` with continuous batching inside the minibatch. `watermark` is what came before
work-in-progress credits: random order, whole batches, and the queue's high mark as the only throttle. All refresh
their weights `in_place`, so that order and work in progress are compared and nothing else; `retract` is `fully_async`
with the refresh that computes every running context again.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.drawing import MODE_COLOURS, panels, save
from benchmarks.scheduling.setting import BARRIER, ENGINE, PADDED, REGIMES, WATERMARK, arguments, measure, scenario
from forebay.simulation.model import EngineModel, Scenario

POLICIES = ("fifo", "longest_first", "asp", "balanced")


@dataclass(frozen=True)
class Variant:
    """What is compared."""

    kind: str
    policy: str
    changes: tuple[str, ...]
    engine: EngineModel = ENGINE
    plain: bool = False
    """Without the preference for quick minibatches when the queue runs low."""

    def at(self, regime: str, seed: int) -> Scenario:
        changes = (f"schedule.policy={self.policy}", *self.changes)
        return scenario(regime, changes, seed, self.engine, plain=self.plain)


WATERMARK_FIFO = Variant("watermark", "fifo", (*WATERMARK, "training.streaming=false"), plain=True)
VARIANTS = (
    *(Variant("padded", policy, BARRIER, PADDED, plain=True) for policy in ("fifo", "asp")),
    *(Variant("barrier", policy, BARRIER, plain=True) for policy in ("fifo", "asp")),
    *(Variant(mode, policy, (f"mode={mode}",)) for mode in ("sync", "one_step_off") for policy in POLICIES),
    WATERMARK_FIFO,
    *(Variant("fully_async", policy, ()) for policy in POLICIES),
    Variant("retract", "balanced", ("control.refresh=retract",)),
)


def main() -> None:
    seeds = arguments(__doc__, seeds=5).seeds
    rows = [
        measure({"regime": regime, "mode": v.kind, "policy": v.policy}, [v.at(regime, seed) for seed in range(seeds)])
        for regime in REGIMES
        for v in VARIANTS
    ]
    draw(rows)
    report("scheduling_regimes", f"regimes, {seeds} seeds", rows, outcome(rows))


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Step time over the bound by regime, mode and policy."""
    return {
        regime: {f"{r['mode']} {r['policy']}": r["over_bound"] for r in rows if r["regime"] == regime}
        for regime in REGIMES
    }


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = panels([f"{regime}: step time over the bound" for regime in REGIMES], 4.6, share_y=True)
    for ax, regime in zip(axes, REGIMES, strict=True):
        own = [row for row in rows if row["regime"] == regime][::-1]
        places = range(len(own))
        ax.barh(
            places,
            [row["over_bound"] for row in own],
            xerr=[row["over_bound_sd"] for row in own],
            color=[MODE_COLOURS[row["mode"]] for row in own],
            error_kw={"linewidth": 1},
        )
        ax.axvline(1.0, color="black", linewidth=1)
        ax.set_yticks(places, [f"{row['mode']} {row['policy']}" for row in own])
        for place, row in zip(places, own, strict=True):
            text = f" {row['over_bound']:.2f}, staleness {row['lag_mean']:.1f}"
            ax.text(row["over_bound"] + row["over_bound_sd"], place, text, va="center", fontsize=8)
        ax.set_xlim(0, 1.6 * max(row["over_bound"] for row in own))
    save(figure, "regimes")


if __name__ == "__main__":
    main()
