"""The studies in short: what the project promises of its scheduling, in less than a minute on one core.

    python -m benchmarks.scheduling [--seeds 3]

- `barrier_static_asp_gain`, `barrier_minibatch_asp_gain`: how much less a step takes with `asp` than in random order,
  where an engine gets a minibatch when it is done with the one before: with static, padded batches, and with continuous
  batching inside the minibatch. Engines are the bottleneck.
- `stream_over_bound_max`: `fully_async` with its defaults, step time over max(train, rollout), the worst of the three
  regimes.
- `lag_reduction`: how much lower its mean staleness is than that of `watermark` (random order, whole batches, the
  queue's high mark as the only throttle), over the three regimes together; `lag_reduction_min`: in the worst of them.
  `step_time_over_watermark`: what it pays for that, the worst of the three.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.regimes import VARIANTS, WATERMARK_FIFO
from benchmarks.scheduling.setting import REGIMES, arguments, measure

BARRIER_REGIME = "rollout-bound"


def main() -> None:
    seeds = arguments(__doc__, seeds=3).seeds
    named = {(variant.kind, variant.policy): variant for variant in VARIANTS}
    barriers = [named[kind, policy] for kind in ("padded", "barrier") for policy in ("fifo", "asp")]
    wanted = [(BARRIER_REGIME, variant) for variant in barriers]
    wanted += [(regime, v) for regime in REGIMES for v in (WATERMARK_FIFO, named["fully_async", "balanced"])]
    rows = [
        measure({"regime": regime, "mode": v.kind, "policy": v.policy}, [v.at(regime, seed) for seed in range(seeds)])
        for regime, v in wanted
    ]
    report("scheduling", f"scheduling in short, {seeds} seeds", rows, outcome(rows))


def outcome(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The promised numbers."""

    def value(name: str, kind: str, policy: str, regime: str = BARRIER_REGIME) -> float:
        key = (regime, kind, policy)
        return next(float(row[name]) for row in rows if (row["regime"], row["mode"], row["policy"]) == key)

    def gain(kind: str) -> float:
        return 1 - value("step_time_s", kind, "asp") / value("step_time_s", kind, "fifo")

    stream, before = ("fully_async", "balanced"), ("watermark", "fifo")
    lags = [(value("lag_mean", *stream, regime), value("lag_mean", *before, regime)) for regime in REGIMES]
    return {
        "barrier_static_asp_gain": gain("padded"),
        "barrier_minibatch_asp_gain": gain("barrier"),
        "stream_over_bound_max": max(value("over_bound", *stream, regime) for regime in REGIMES),
        "lag_reduction": 1 - statistics.fmean(own for own, _ in lags) / statistics.fmean(other for _, other in lags),
        "lag_reduction_min": min(1 - own / other for own, other in lags),
        "step_time_over_watermark": max(
            value("step_time_s", *stream, regime) / value("step_time_s", *before, regime) for regime in REGIMES
        ),
    }


if __name__ == "__main__":
    main()
