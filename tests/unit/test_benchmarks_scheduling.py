"""The scheduling studies: their setting, and what they conclude from rows."""

import statistics
from typing import Any

import pytest

from benchmarks.scheduling import __main__ as short
from benchmarks.scheduling import bounds, oscillation, predictors, published, regimes, setting, work_in_progress
from forebay.simulation.bound import bound
from forebay.simulation.run import simulate

FEW = ("training.steps=14",)


@pytest.mark.parametrize(("regime", "ratio"), setting.REGIMES.items())
def test_a_regime_is_the_ratio_of_the_two_bounds(regime: str, ratio: float) -> None:
    limit = bound(setting.scenario(regime, FEW, seed=1))
    assert limit.train_s / limit.rollout_s == pytest.approx(ratio)
    assert limit.binding == ("rollout" if ratio < 1 else "train")


def test_the_rollout_bound_is_that_of_the_formula() -> None:
    made = setting.scenario(0.5, FEW)
    lengths = made.workload.lengths
    mean, square = lengths.mean(), (lengths.astype(float) ** 2).mean()
    step_s = 0.008 + 5e-5 * 64 + 4.5e-8 * 64 * (200 + square / (2 * mean))
    expected = 64 * 8 * mean * step_s / (8 * 64) + 64 * 200 * 2e-5 / 8 + 1.5
    assert bound(made).rollout_s == pytest.approx(expected)


def test_variants_are_what_their_names_say() -> None:
    sync = setting.scenario("balanced", ("mode=sync", *FEW))
    assert (sync.rules.max_staleness, sync.streaming, sync.rules.refresh_all) == (0, False, True)
    stream = regimes.Variant("fully_async", "balanced", FEW).at("balanced", 0)
    assert (stream.streaming, stream.rules.work_in_progress, stream.rules.refresh_all) == (True, None, False)
    before = regimes.WATERMARK_FIFO.at("balanced", 0)
    assert (before.streaming, before.rules.queue_high, before.rules.queue_low) == (False, 2, 0)
    assert before.rules.work_in_progress == before.rules.max_staleness == 1000
    padded = next(v for v in regimes.VARIANTS if (v.kind, v.policy) == ("padded", "asp")).at("balanced", 0)
    assert padded.engine.padded
    assert padded.rules.minibatch_barrier
    lengths = [padded.workload.predicted[m] for group in padded.order for m in group]
    assert statistics.fmean(part.max() / part.mean() for part in lengths) < 1.1, "minibatches of like length"


def test_every_study_names_each_of_its_variants_once() -> None:
    assert len({(v.kind, v.policy) for v in regimes.VARIANTS}) == len(regimes.VARIANTS)
    assert len({v.name for v in oscillation.VARIANTS}) == len(oscillation.VARIANTS)
    named = [(kind, value) for kind, value, _ in work_in_progress.variants()]
    assert len(set(named)) == len(named)


def test_the_loop_of_the_sources_alternates_and_staggering_stops_it_at_the_same_mean() -> None:
    source, staggered = (simulate(v.scenario()) for v in (oscillation.SOURCE, oscillation.STAGGERED))
    fast, slow = sorted(source.step_times[:2])
    assert fast == pytest.approx(12, abs=1)
    assert slow == pytest.approx(30, abs=1)
    assert source.autocorrelation < -0.9
    assert source.step_times[::2].std() == pytest.approx(0, abs=0.1)
    assert staggered.step_time_sd < 0.1
    assert staggered.step_time_s == pytest.approx(source.step_time_s, rel=0.01)


def test_a_perfect_predictor_knows_each_groups_own_mean() -> None:
    known = setting.scenario(0.5, FEW, perfect=True).workload
    assert known.predicted.tolist() == known.lengths.mean(axis=1).tolist()
    weak, strong = (predictors.at("fully_async, balanced", quality, 0).workload for quality in ("0.6", "1.0"))
    assert (weak.lengths == strong.lengths).all(), "quality changes what is predicted, not what happens"
    spread = [work.predicted.std() for work in (weak, strong)]
    assert spread[0] < spread[1]


def test_nodes_scale_the_engines_and_not_the_trainer() -> None:
    one, four = (published.at(published.KINDS["streaming"], nodes, 0.5, 0) for nodes in (1, 4))
    assert (one.engines, four.engines) == (2, 8)
    assert one.trainer == four.trainer
    colocated = published.at(published.KINDS["colocated sync"], 4, 0.5, 0)
    assert colocated.engines == 16
    assert colocated.trainer.per_token_s == pytest.approx(four.trainer.per_token_s / 2)


def row(regime: str, mode: str, policy: str, **values: float) -> dict[str, Any]:
    return {"regime": regime, "mode": mode, "policy": policy, "over_bound": 1.0, "lag_mean": 1.0} | values


def test_the_promised_numbers_are_ratios_of_the_right_rows() -> None:
    rows = [
        row("rollout-bound", "padded", "fifo", step_time_s=150.0),
        row("rollout-bound", "padded", "asp", step_time_s=120.0),
        row("rollout-bound", "barrier", "fifo", step_time_s=80.0),
        row("rollout-bound", "barrier", "asp", step_time_s=84.0),
    ]
    lags = {"rollout-bound": (2.0, 1.5), "balanced": (3.0, 1.5), "train-bound": (5.0, 1.0)}
    for regime, (before, now) in lags.items():
        rows.append(row(regime, "watermark", "fifo", step_time_s=40.0, lag_mean=before))
        over = 1.019 if regime == "balanced" else 1.001
        rows.append(row(regime, "fully_async", "balanced", step_time_s=40.0 * over, lag_mean=now, over_bound=over))
    result = short.outcome(rows)
    assert result["barrier_static_asp_gain"] == pytest.approx(0.2)
    assert result["barrier_minibatch_asp_gain"] == pytest.approx(-0.05)
    assert result["stream_over_bound_max"] == 1.019
    assert result["lag_reduction"] == pytest.approx(1 - 4 / 10)
    assert result["lag_reduction_min"] == pytest.approx(0.25)
    assert result["step_time_over_watermark"] == pytest.approx(1.019)


def test_a_share_of_stale_groups_is_of_the_trained_ones() -> None:
    made = [
        setting.scenario("rollout-bound", ("control.max_staleness=1", "training.steps=16"), seed) for seed in (0, 1)
    ]
    measured = setting.measure({"what": "x"}, made)
    results = [simulate(one) for one in made]
    shares = [r.fates["stale"] / r.fates["trained"] for r in results]
    assert measured["stale_share"] == pytest.approx(statistics.fmean(shares))
    assert measured["step_time_s"] == pytest.approx(statistics.fmean(r.step_time_s for r in results))
    assert measured["lag_max"] == max(r.staleness.max for r in results) <= 1


def test_the_bounds_study_asks_for_what_it_says() -> None:
    limits = [setting.scenario(bounds.REGIME, (f"control.max_staleness={n}", *FEW)).rules.max_staleness for n in (1, 8)]
    assert limits == [1, 8]
