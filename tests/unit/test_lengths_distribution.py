"""The log-normal model: closed forms against quadrature and scipy, censored estimation against known truth."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from forebay.config.sections import AssumedLengthsConfig
from forebay.lengths.assumed import CHUNK, draw, prompt_ids
from forebay.lengths.censored import estimate, posterior
from forebay.lengths.lognormal import capped_mean, capped_quantile, tail
from forebay.lengths.prompts import observe


@given(mu=st.floats(-2, 12), sd=st.floats(0.01, 3), cap=st.floats(1, 1e6))
def test_capped_mean_equals_quadrature(mu, sd, cap):
    """E[min(X, c)] is the integral of the survival function from 0 to c."""
    survival = stats.norm(mu, sd).sf
    edges = np.clip(np.exp(mu + sd * np.linspace(-9, 9, 40)), 0, cap)
    expected = sum(integrate.quad(lambda x: survival(np.log(x)), a, b)[0] for a, b in pairwise(edges))
    expected += edges[0]
    expected += integrate.quad(lambda x: survival(np.log(x)), edges[-1], cap)[0]
    assert capped_mean(np.array([mu]), sd, cap)[0] == pytest.approx(min(expected, cap), rel=1e-6)


@given(mu=st.floats(-50, 50), sd=st.floats(0, 20), cap=st.floats(1, 1e7))
def test_capped_mean_is_finite_within_the_cap_and_rises(mu, sd, cap):
    low, high = capped_mean(np.array([mu, mu + 0.1]), sd, cap)
    assert 0 <= low <= high * (1 + 1e-9)
    assert high <= cap


def test_capped_quantile_equals_scipy():
    mu, share = np.array([1.0, 4.0, 9.0]), np.array([0.1, 0.5, 0.9])
    expected = np.minimum(stats.lognorm(s=0.7, scale=np.exp(mu)).ppf(share), 500)
    np.testing.assert_allclose([capped_quantile(m, 0.7, q, 500) for m, q in zip(mu, share, strict=True)], expected)


@given(bound=st.floats(-8, 12))
def test_tail_moments_equal_scipy(bound):
    first, second = tail(np.array([bound]))
    truncated = stats.truncnorm(bound, np.inf)
    assert first[0] == pytest.approx(truncated.mean(), rel=1e-6)
    assert second[0] == pytest.approx(truncated.moment(2), rel=1e-5)


def test_tail_far_out_is_finite():
    first, second = tail(np.array([40.0, 200.0]))
    np.testing.assert_allclose(first, [40.0, 200.0], rtol=1e-3)
    np.testing.assert_allclose(second, [1600.0, 40_000.0], rtol=2e-3)


def sample(rng, prompts, responses, cap):
    """(observed, the same with truncation ignored, true log locations)."""
    mu = np.log(500) + 0.7 * rng.standard_normal(prompts)
    lengths = np.exp(mu[:, None] + 0.4 * rng.standard_normal((prompts, responses)))
    cut = lengths >= cap
    seen = np.minimum(lengths, cap)
    honest = observe(list(zip(seen.tolist(), cut.tolist(), strict=True)))
    blind = observe([(row.tolist(), [False] * responses) for row in seen])
    return honest, blind, mu


def test_posterior_without_truncation_equals_gaussian_conditioning():
    rng = np.random.default_rng(0)
    groups = [(np.exp(rng.normal(3, 1, size=n)).tolist(), [False] * n) for n in (1, 4, 2)]
    observed, prior, between, within = observe([*groups, ([], [])]), np.array([1.0, 2.0, 3.0, 4.0]), 0.6, 0.3
    found = posterior(observed, prior, between, within)
    for i, (lengths, _) in enumerate(groups):
        n = len(lengths)
        # The joint normal of (mu, y_1..y_n), conditioned by linear algebra.
        covariance = between**2 * np.ones((n, n)) + within**2 * np.eye(n)
        gain = between**2 * np.ones(n) @ np.linalg.inv(covariance)
        assert found.location[i] == pytest.approx(prior[i] + gain @ (np.log(lengths) - prior[i]))
        assert found.variance[i] == pytest.approx(between**2 - gain @ np.ones(n) * between**2)
        assert found.target[i] == pytest.approx(np.mean(np.log(lengths)))
    assert found.location[3] == pytest.approx(4.0)
    assert found.variance[3] == pytest.approx(between**2)
    assert np.isnan(found.target[3])


@pytest.mark.parametrize("cap", [2000.0, 800.0, 500.0])
def test_truncation_biases_the_estimate_far_less_than_ignoring_it(cap):
    """2%, 25% and 50% of the responses are cut off."""
    honest, blind, mu = sample(np.random.default_rng(1), 4000, 4, cap)

    def mean_length(spread):
        return np.exp(spread.location + (spread.between**2 + spread.within**2) / 2)

    truth = np.exp(np.log(500) + (0.7**2 + 0.4**2) / 2)
    biased, corrected = mean_length(estimate(blind)), mean_length(estimate(honest))
    assert biased < truth
    assert abs(corrected - truth) < 0.35 * abs(biased - truth) + 0.02 * truth
    spread = estimate(honest)
    found = posterior(honest, spread.location, spread.between, spread.within)
    assert abs(np.mean(found.location - mu)) < 0.3 * abs(np.mean(np.log(blind.means()) - mu)) + 0.01


def test_estimate_recovers_the_spreads_without_truncation():
    honest, _, _ = sample(np.random.default_rng(2), 5000, 4, 1e12)
    spread = estimate(honest)
    assert (spread.location, spread.between, spread.within) == pytest.approx((np.log(500), 0.7, 0.4), rel=0.03)


@pytest.mark.parametrize("flag", [False, True])
def test_constant_lengths_have_no_spread(flag):
    observed = observe([([128, 128], [flag, flag])] * 6)
    spread = estimate(observed)
    assert spread.location == pytest.approx(np.log(128), abs=0.01)
    assert spread.between < 0.01
    assert spread.within < 0.01
    found = posterior(observed, spread.location, spread.between, spread.within)
    assert np.all(np.isfinite(found.location))
    assert np.all(found.variance > 0)


def test_assumed_lengths_have_the_asked_distribution():
    assumed = AssumedLengthsConfig(median=300, prompt_sd=0.5, within_sd=0.3, prompt_tokens=77)
    drawn = draw(40_000, 4, assumed, longest=10**6, seed=3)
    logs = np.log(drawn.lengths)
    assert drawn.lengths.dtype == np.int32
    assert np.median(drawn.lengths) == pytest.approx(300, rel=0.02)
    assert logs.mean(axis=1).std() == pytest.approx(np.hypot(0.5, 0.3 / 2), rel=0.02)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.3 * 0.9213, rel=0.02)  # c4 for four values
    assert np.all(drawn.prompt_tokens == 77)
    assert prompt_ids(2) == ["p0000000", "p0000001"]


@pytest.mark.parametrize("rho", [-1.0, -0.5, 0.3, 0.8, 0.95, 1.0])
def test_assumed_predictor_has_the_asked_rank_correlation(rho):
    """With the expected length, which one response a prompt without spread within it is."""
    assumed = AssumedLengthsConfig(within_sd=0.0, rank_correlation=rho)
    drawn = draw(60_000, 1, assumed, longest=10**7, seed=1)
    assert stats.spearmanr(drawn.predicted, drawn.lengths[:, 0]).statistic == pytest.approx(rho, abs=0.01)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_assumed_predictions_are_calibrated_with_the_budget(rho):
    """Among prompts of like prediction, the mean length is what was predicted, although a fifth is cut off."""
    drawn = draw(200_000, 2, AssumedLengthsConfig(rank_correlation=rho), longest=3000, seed=5)
    assert np.mean(drawn.lengths == 3000) > 0.15
    assert np.all((drawn.predicted >= 1) & (drawn.predicted <= 3000))
    for part in np.array_split(np.argsort(drawn.predicted), 4):
        assert drawn.lengths[part].mean() == pytest.approx(drawn.predicted[part].mean(), rel=0.02)


def test_assumed_prompts_do_not_depend_on_how_many_are_drawn_or_how_often():
    few = draw(100, 8, AssumedLengthsConfig(), 8192, 4)
    many = draw(CHUNK + 100, 8, AssumedLengthsConfig(), 8192, 4)
    other = draw(100, 3, AssumedLengthsConfig(), 8192, 4)
    np.testing.assert_array_equal(few.lengths, many.lengths[:100])
    np.testing.assert_array_equal(few.predicted, many.predicted[:100])
    np.testing.assert_array_equal(few.predicted, other.predicted)
    assert not np.array_equal(few.lengths, draw(100, 8, AssumedLengthsConfig(), 8192, 5).lengths)


@given(median=st.floats(1, 1e6), sd=st.floats(0, 5), within=st.floats(0, 5), longest=st.integers(1, 10**6))
def test_assumed_lengths_stay_in_their_range_whatever_is_assumed(median, sd, within, longest):
    drawn = draw(50, 2, AssumedLengthsConfig(median=median, prompt_sd=sd, within_sd=within), longest, 0)
    assert drawn.lengths.min() >= 1
    assert drawn.lengths.max() <= longest
    assert np.all(np.isfinite(drawn.predicted) & (drawn.predicted >= 1) & (drawn.predicted <= longest))
