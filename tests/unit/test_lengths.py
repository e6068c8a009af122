"""The length predictor against scipy, plain leave-one-out refits, and data whose lengths are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from forebay.lengths.predictor import PENALTIES, _ridge, fit, spearman


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), min_size=2, max_size=40))
def test_spearman_equals_scipy(pairs):
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    ours = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert ours is None
    else:
        assert ours == pytest.approx(spearmanr(x, y).statistic, abs=1e-9)


def test_ridge_picks_the_penalty_that_refitting_without_each_row_picks():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 6))
    target = features @ rng.normal(size=6) + rng.normal(size=30)

    def error(penalty):
        total = 0.0
        for row in range(30):
            keep = np.arange(30) != row
            gram = features[keep].T @ features[keep] + penalty * np.eye(6)
            weights = np.linalg.solve(gram, features[keep].T @ target[keep])
            total += (target[row] - features[row] @ weights) ** 2
        return total

    penalty, weights = _ridge(features, target)
    assert penalty == min(PENALTIES, key=error)
    expected = np.linalg.solve(features.T @ features + penalty * np.eye(6), features.T @ target)
    np.testing.assert_allclose(weights, expected, rtol=1e-8)


def synthetic(rng, count):
    prompts = [list(rng.integers(0, 50, size=rng.integers(5, 40))) for _ in range(count)]
    lengths = [2.0 + len(prompt) + 5 * prompt.count(7) for prompt in prompts]
    return prompts, lengths


def test_predictor_ranks_unseen_prompts_and_keeps_the_mean():
    rng = np.random.default_rng(1)
    prompts, lengths = synthetic(rng, 300)
    predictor = fit(prompts, lengths, longest=128)
    assert predictor.predict(prompts).mean() == pytest.approx(np.mean(lengths), rel=0.01)
    unseen, truth = synthetic(rng, 200)
    assert spearman(list(predictor.predict(unseen)), truth) > 0.9


def test_predictor_survives_constant_data_and_keeps_its_range():
    predictor = fit([[1, 2]] * 5, [7.0] * 5, longest=16)
    np.testing.assert_allclose(predictor.predict([[1, 2], [3] * 1000]), [7.0, 7.0], rtol=1e-6)
    wide = fit([[1]] * 3 + [[2] * 60] * 3, [1.0] * 3 + [100.0] * 3, longest=16)
    values = wide.predict([[2] * 10_000, [], [1]])
    assert np.all((values >= 1) & (values <= 16))
