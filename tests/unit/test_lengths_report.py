"""Ceiling and coverage against simulations whose truth is known; what is written and printed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, spearmanr

from forebay.config import parse_config
from forebay.lengths.ceiling import ceiling, kendall, spearman
from forebay.lengths.censored import estimate
from forebay.lengths.predictor import Calibrated, with_error, with_mean, with_quantiles
from forebay.lengths.profile import sample_order
from forebay.lengths.prompts import make_prompts, observe
from forebay.lengths.report import LEVELS, Judgement, judge, lines, result_of, write_report
from forebay.run import RunContext
from tests.unit.test_lengths import Told, named


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), min_size=2, max_size=40))
def test_rank_correlations_equal_scipy(pairs):
    x, y = np.array([float(a) for a, _ in pairs]), np.array([b for _, b in pairs])
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert spearman(x, y) is kendall(x, y) is None
    else:
        assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-9)
        assert kendall(x, y) == pytest.approx(kendalltau(x, y).statistic, abs=1e-9)


def lognormal(seed, prompts, responses, between, within):
    """(observed, expected length of each prompt)."""
    rng = np.random.default_rng(seed)
    mu = np.log(500) + between * rng.standard_normal(prompts)
    lengths = np.maximum(np.rint(np.exp(mu[:, None] + within * rng.standard_normal((prompts, responses)))), 1)
    return observe([(row.tolist(), [False] * responses) for row in lengths]), np.exp(mu)


@pytest.mark.parametrize("responses", [2, 3, 4, 8])
@pytest.mark.parametrize(("between", "within"), [(0.8, 0.35), (0.5, 0.5), (0.3, 0.5)])
def test_the_ceiling_is_what_the_truth_reaches(responses, between, within):
    observed, truth = lognormal(1, 6000, responses, between, within)
    found = ceiling(observed)
    assert found.spearman == pytest.approx(spearmanr(truth, observed.means()).statistic, abs=0.03)
    assert found.kendall == pytest.approx(kendalltau(truth, observed.means()).statistic, abs=0.03)


def test_the_ceiling_rises_with_responses_and_is_one_without_spread():
    values = [ceiling(lognormal(2, 2000, n, 0.5, 0.6)[0]).spearman for n in (2, 4, 8)]
    assert values == sorted(values)
    assert ceiling(lognormal(2, 200, 4, 0.5, 0.0)[0]).spearman == pytest.approx(1.0)


def test_the_ceiling_of_pure_noise_is_near_zero():
    assert ceiling(lognormal(3, 4000, 4, 0.0, 0.6)[0]).spearman < 0.25


def test_the_ceiling_is_unknown_without_a_second_response_or_any_difference():
    assert ceiling(observe([([float(i)], [False]) for i in range(1, 9)])) is None
    assert ceiling(observe([([5.0, 5.0], [False, False])] * 8)) is None
    assert ceiling(observe([([5.0, 6.0], [False, False])] * 2)) is None


def judged(seed=4, prompts=2000, cap=3000):
    rng = np.random.default_rng(seed)
    logs = np.log(400) + 0.8 * rng.standard_normal(prompts)
    lengths = np.exp(logs[:, None] + 0.4 * rng.standard_normal((prompts, 4)))
    seen = np.minimum(np.maximum(np.rint(lengths), 1), cap)
    observed = observe(list(zip(seen.tolist(), (lengths >= cap).tolist(), strict=True)))
    predictor = Calibrated(Told(logs + 0.3 * rng.standard_normal(prompts)), cap, 0.4, 0.3)
    predictor = with_quantiles(with_mean(predictor, named(prompts), observed), named(prompts), observed, 0.9)
    return predictor, observed


def test_coverage_is_as_asked_for_where_held_out_prompts_are_like_each_other():
    predictor, observed = judged()
    found = judge(predictor, named(2000), observed, 0.9)
    np.testing.assert_allclose(found.coverage, LEVELS, atol=0.03)
    assert found.upper == pytest.approx(0.9, abs=0.02)
    assert found.median == pytest.approx(0.5, abs=0.03)


def test_the_upper_quantile_covers_what_it_says_over_many_samples():
    """Prompts in the order in which they are profiled (short and long ones in turn), a predictor that is blind to their
    length, spreads that grow with it, a few prompts without an answer: the reported coverage and that of other prompts
    are 90% in expectation."""

    def covered(seed, population=1200, held_out=96):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(10, 200, population)
        long = (sizes - 10) / 190
        logs = 3 + 1.5 * long + (0.1 + 0.4 * long) * rng.standard_normal(population)
        lengths = np.exp(logs[:, None] + (0.1 + 0.6 * long[:, None]) * rng.standard_normal((population, 4)))
        order = sample_order(sizes, seed)
        early, late, others = order[:held_out], order[held_out : 3 * held_out], order[3 * held_out :]
        answers = [(row.tolist(), [False] * 4) for row in lengths]
        for place in early[::7]:
            answers[place] = ([], [])
        first, second = observe([answers[i] for i in early]), observe([answers[i] for i in late])
        spread = estimate(second)
        blind = Calibrated(Told(np.full(population, spread.location)), 10**9, spread.within, spread.between)
        everyone = named(population)
        predictor = with_error(blind, everyone.take(early), first)
        predictor = with_quantiles(predictor, everyone.take(early), first, 0.9)
        upper = predictor.predict(everyone.take(others)).upper
        found = judge(predictor, everyone.take(early), first, 0.9)
        return found.upper, found.median, np.mean(lengths[others] <= upper[:, None])

    reported, median, new = np.mean([covered(seed) for seed in range(120)], axis=0)
    assert reported == pytest.approx(0.9, abs=0.015)
    assert new == pytest.approx(0.9, abs=0.015)
    assert median == pytest.approx(0.5, abs=0.015)


@pytest.fixture
def run(tmp_path):
    config = parse_config({"storage": {"scratch": str(tmp_path)}}, "test")
    context = RunContext.create(config)
    context.lengths.mkdir(parents=True)
    return context


def test_the_report_says_what_was_measured(run):
    predictor, observed = judged(prompts=300)
    judgement = judge(predictor, named(300), observed, 0.9)
    result = result_of(judgement, observed, predictor="features", asked=12, upper=0.9, notes=["a note"])
    means = observed.means()
    assert result.spearman == pytest.approx(spearmanr(judgement.predicted, means).statistic)
    assert result.kendall == pytest.approx(kendalltau(judgement.predicted, means).statistic)
    assert result.mae == pytest.approx(np.abs(judgement.predicted - means).mean())
    assert result.share == pytest.approx(result.spearman / result.ceiling)
    assert result.truncated == observed.truncated.mean() > 0
    assert (result.median, result.prompt_sd, result.within_sd) == pytest.approx((400, 0.8, 0.4), rel=0.15)
    figure = write_report(run, result, judgement)
    assert figure.read_bytes().startswith(b"\x89PNG")
    record = json.loads((run.lengths / "report.json").read_text())
    assert record["spearman"] == result.spearman
    assert list(record["coverage_by_quantile"]) == [str(level) for level in LEVELS]
    text = dict(lines(run, result))
    assert text["profile"] == "300 prompts, 12 responses generated now"
    assert f"Spearman {result.spearman:.2f}" in text["rank correlation"]
    assert text["note"] == "a note"


def test_equal_lengths_are_reported_as_what_they_are(run):
    observed = observe([([9.0, 9.0], [False, False])] * 8)
    predictor = Calibrated(Told(np.full(8, np.log(9))), 64, 0.0, 0.0)
    judgement = judge(predictor, named(8), observed, 0.9)
    result = result_of(judgement, observed, predictor="features", asked=0, upper=0.9)
    assert (result.spearman, result.kendall, result.ceiling, result.share) == (None, None, None, None)
    assert result.notes == ("all lengths are equal: nothing can be ranked, and every order of the prompts is as good",)
    write_report(run, result, judgement)
    assert json.loads((run.lengths / "report.json").read_text())["spearman"] is None
    assert "Spearman -, Kendall - on 8" in dict(lines(run, result))["rank correlation"]


def test_a_single_held_out_prompt_has_no_coverage(run):
    observed = observe([([9.0, 8.0], [False, False])])
    prompts = make_prompts(["0"], [[3]])
    judgement = judge(Calibrated(Told(np.array([2.0])), 64, 0.1, 0.1), prompts, observed, 0.9)
    assert judgement == Judgement(judgement.predicted, observed, None, None, None)
    result = result_of(judgement, observed, predictor="features", asked=0, upper=0.9)
    assert result.coverage is None
    write_report(run, result, judgement)
