"""Online correction of predicted lengths against worlds whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.lengths.online import LengthCorrection


def groups(rng, count, *, drift=1.0, between=0.3, within=0.35, size=8):
    """(predicted mean, true lengths) of log-normal groups; `drift` multiplies every length."""
    for _ in range(count):
        predicted = math.exp(rng.normal(5.0, 0.8))
        centre = math.log(predicted * drift) - within**2 / 2 - between**2 / 2 + rng.normal(0.0, between)
        yield predicted, np.maximum(1, np.round(np.exp(centre + rng.normal(0.0, within, size)))).astype(int)


@pytest.mark.parametrize("drift", [0.4, 1.0, 2.5])
def test_predictions_follow_a_policy_that_answers_longer_or_shorter(drift):
    rng, correction = np.random.default_rng(0), LengthCorrection()
    for predicted, lengths in groups(rng, 400, drift=drift):
        correction.observed(predicted, list(lengths))
    fresh = list(groups(rng, 2000, drift=drift))
    bias = np.mean([correction.expected(p) for p, _ in fresh]) / np.mean([lengths.mean() for _, lengths in fresh])
    assert bias == pytest.approx(1.0, abs=0.12)


def test_buckets_drift_apart():
    correction = LengthCorrection()
    for _ in range(200):
        correction.observed(20.0, [40, 40])
        correction.observed(1000.0, [500, 500])
    assert correction.expected(20.0) == pytest.approx(40.0, rel=0.1)
    assert correction.expected(1000.0) == pytest.approx(500.0, rel=0.1)


def test_finished_members_sharpen_the_rest():
    """After each of the first seven responses the mean of the others is predicted better than without that news."""
    rng, correction = np.random.default_rng(1), LengthCorrection()
    for predicted, lengths in groups(rng, 300, between=0.5):
        correction.observed(predicted, list(lengths))
    plain, sharpened = [], []
    for predicted, lengths in groups(rng, 1500, between=0.5):
        ordered = np.sort(lengths)
        for done in (2, 4, 6):
            truth, reached = ordered[done:].mean(), int(ordered[done - 1])
            guess = correction.rest(predicted, list(ordered[:done]), 8 - done, reached)
            plain.append(abs(max(correction.expected(predicted), reached) - truth) / truth)
            sharpened.append(abs(guess - truth) / truth)
    assert np.mean(sharpened) < 0.75 * np.mean(plain)


def test_the_rest_of_a_lonely_response_is_the_tail_mean_of_a_log_normal():
    """With a prior that is certain, E[L | L > c] by numerical integration in numpy."""
    correction = LengthCorrection()
    for _ in range(4000):  # no spread between groups, 0.35 within
        correction.observed(100.0, [int(100 * math.exp(z)) for z in (-0.4055, 0.0, 0.2877)])
    middle = correction.expected(100.0)
    within = correction._within.mean
    x = np.linspace(1, 5000, 2_000_000)
    density = np.exp(-((np.log(x) - (math.log(middle) - within / 2)) ** 2) / (2 * within)) / x
    tail = x > 150
    truth = float((x * density)[tail].sum() / density[tail].sum())
    assert correction.rest(100.0, [], 1, 150) == pytest.approx(truth, rel=0.05)


@given(
    predicted=st.floats(1e-3, 1e6),
    finished=st.lists(st.integers(0, 10**5), max_size=8),
    running=st.integers(0, 8),
    reached=st.integers(0, 10**5),
    seen=st.lists(
        st.tuples(st.floats(1e-3, 1e6), st.lists(st.integers(0, 10**5), min_size=1, max_size=8)), max_size=20
    ),
)
def test_predictions_are_finite_and_within_the_budget(predicted, finished, running, reached, seen):
    correction = LengthCorrection(longest=4096)
    for before, lengths in seen:
        correction.observed(before, lengths)
    assert 1.0 <= correction.expected(predicted) <= 4096
    rest = correction.rest(predicted, finished, running, min(reached, 4096))
    assert min(reached, 4096) <= rest <= 4096 or rest == 1.0
