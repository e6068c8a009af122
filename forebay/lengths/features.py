"""`features`: gradient boosting and ridge regression on cheap features of the prompt, blended as cross-validation says.

Features: the prompt's length, counts of frequent tokens and, where the start model was asked for it, length and
log-probability of its greedy response: one response instead of a group's n, and a function of prompt and model alone.
Memory is one chunk of prompts, however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from forebay.lengths.prompts import Prompts, Vector
from forebay.lengths.ridge import Ridge, fit_ridge

VOCABULARY = 96
"""Most frequent prompt tokens that are counted as features of their own."""
CHUNK = 32_768
"""Prompts whose features are in memory at a time."""
TREES = 200
"""Most boosting rounds; cross-validation chooses how many."""
FEW = 40
"""With fewer prompts than this there is ridge regression only."""
FOLDS = 5
PLAIN = 6


@dataclass(frozen=True)
class Features:
    """Fitted by `fit_features`; a `Location`."""

    tokens: NDArray[np.int64]
    """Tokens that are counted, by id."""
    ridge: Ridge
    trees: Any
    """A fitted `HistGradientBoostingRegressor`; None if it has no weight."""
    weight: float
    """Of the trees, in [0, 1]."""

    def predict(self, prompts: Prompts) -> Vector:
        """Mean log length of each prompt's responses."""
        with threadpool_limits(1):
            parts = [self._predict(matrix(chunk, self.tokens)) for chunk in prompts.chunks(CHUNK)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _predict(self, features: Vector) -> Vector:
        linear = self.ridge.predict(features) if self.weight < 1 else 0.0
        boosted = self.trees.predict(features) if self.trees is not None else 0.0
        return np.asarray(self.weight * boosted + (1 - self.weight) * linear, dtype=np.float64)


def fit_features(prompts: Prompts, target: Vector, seed: int) -> Features:
    """`target`: mean log length of each prompt's responses.

    One thread: on so few rows several are no faster, and a hundred times slower where their cores are busy.
    """
    tokens = frequent(prompts)
    features = matrix(prompts, tokens)
    ridge = fit_ridge(features, target)
    if len(target) < FEW or np.ptp(target) < 1e-9:
        return Features(tokens, ridge, None, 0.0)
    with threadpool_limits(1):
        rounds, weight = _validate(features, target, seed)
        trees = _boosting(features, target, rounds, seed) if weight > 0 else None
    return Features(tokens, ridge, trees, weight)


def frequent(prompts: Prompts) -> NDArray[np.int64]:
    """The token ids that occur most."""
    ids, counts = np.unique(prompts.tokens, return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:VOCABULARY]]).astype(np.int64)


def matrix(prompts: Prompts, tokens: NDArray[np.int64]) -> Vector:
    """[prompts, PLAIN + tokens]: length and its logarithm, log length of the greedy response, its log-probability, that
    of one token of it, how many of the counted tokens occur, and the count of each. NaN where a response is missing."""
    sizes, width = prompts.sizes, len(tokens)
    result = np.empty((len(prompts), PLAIN + width))
    result[:, 0], result[:, 1] = sizes, np.log(sizes + 1)
    result[:, 2], result[:, 3] = np.log(prompts.greedy_tokens), prompts.greedy_logprob
    result[:, 4] = prompts.greedy_logprob / prompts.greedy_tokens
    rest = width  # column of every other token
    column = np.full(int(tokens.max(initial=-1)) + 2, rest)
    column[tokens] = np.arange(width)
    place = np.repeat(np.arange(len(prompts)) * (width + 1), sizes)
    place += column[np.minimum(prompts.tokens, len(column) - 1)]
    counts = np.bincount(place, minlength=len(prompts) * (width + 1)).reshape(len(prompts), width + 1)[:, :width]
    result[:, 5] = (counts > 0).sum(axis=1)
    result[:, PLAIN:] = counts
    return result


def _validate(features: Vector, target: Vector, seed: int) -> tuple[int, float]:
    """Boosting rounds and weight of the trees with the least squared error on folds that the fit did not see
    (stacking: Breiman, 1996)."""
    boosted, linear = np.empty((TREES, len(target))), np.empty(len(target))
    for fold in _folds(len(target), seed):
        rest = np.setdiff1d(np.arange(len(target)), fold)
        trees = _boosting(features[rest], target[rest], TREES, seed)
        for number, values in enumerate(trees.staged_predict(features[fold])):
            boosted[number, fold] = values
        linear[fold] = fit_ridge(features[rest], target[rest]).predict(features[fold])
    rounds = int(np.argmin(((boosted - target) ** 2).mean(axis=1)))
    away = boosted[rounds] - linear
    size = float(away @ away)
    weight = float(np.clip(away @ (target - linear) / size, 0.0, 1.0)) if size > 0 else 0.0
    return rounds + 1, weight


def _folds(count: int, seed: int) -> Sequence[NDArray[np.int64]]:
    return np.array_split(np.random.default_rng(seed).permutation(count), FOLDS)


def _boosting(features: Vector, target: Vector, rounds: int, seed: int) -> Any:
    """Stumpy trees: a few hundred prompts bear no more."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(
        max_iter=rounds,
        learning_rate=0.05,
        max_leaf_nodes=4,
        min_samples_leaf=8,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=seed,
    )
    # It takes unknown values, but no column that has nothing else.
    return trees.fit(np.where(np.isfinite(features).any(axis=0), features, 0.0), target)
