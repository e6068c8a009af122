"""A plain predictor of response length: ridge regression on cheap prompt features, target log mean length.

Invariants: predictions are finite, at least 1 token and at most the response budget; the mean prediction over the
fitted prompts equals their mean observed length (the retransformation from logarithms is corrected by that factor).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 96
"""Most frequent prompt tokens that are counted as features of their own."""
PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Ridge penalties that leave-one-out error chooses from."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class LengthPredictor:
    """Fitted by `fit`; predicts the mean response length of a prompt, in tokens."""

    tokens: tuple[int, ...]
    mean: Vector
    scale: Vector
    weights: Vector
    intercept: float
    factor: float
    longest: int
    penalty: float

    def predict(self, prompts: Sequence[Sequence[int]]) -> Vector:
        """Mean response length of each prompt (token ids), in [1, longest]."""
        features = (_features(prompts, self.tokens) - self.mean) / self.scale
        logs = np.clip(features @ self.weights + self.intercept, 0.0, math.log(self.longest))
        return np.clip(np.exp(logs) * self.factor, 1.0, float(self.longest))


def fit(prompts: Sequence[Sequence[int]], lengths: Sequence[float], longest: int) -> LengthPredictor:
    """Fit on observed mean lengths (tokens, >= 1) of at least two prompts; `longest` is the response budget."""
    counts = Counter(token for prompt in prompts for token in set(prompt))
    tokens = tuple(token for token, _ in counts.most_common(VOCABULARY))
    raw = _features(prompts, tokens)
    mean, scale = raw.mean(axis=0), raw.std(axis=0)
    scale[scale < 1e-9] = 1.0
    features = (raw - mean) / scale
    target = np.log(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0))
    intercept = float(target.mean())
    penalty, weights = _ridge(features, target - intercept)
    fitted = np.exp(np.clip(features @ weights + intercept, 0.0, math.log(longest)))
    factor = float(np.mean(lengths) / fitted.mean())
    return LengthPredictor(tokens, mean, scale, weights, intercept, factor, longest, penalty)


def _ridge(features: Vector, target: Vector) -> tuple[float, Vector]:
    """The penalty with the least leave-one-out error, and its weights. The hat matrix of ridge regression gives each
    leave-one-out residual as r_i / (1 - h_ii) (Golub, Heath and Wahba, 1979)."""
    u, s, vt = np.linalg.svd(features, full_matrices=False)
    projected = u.T @ target
    best = (math.inf, PENALTIES[-1], np.zeros(features.shape[1]))
    for penalty in PENALTIES:
        shrink = s**2 / (s**2 + penalty)
        residual = target - u @ (shrink * projected)
        leverage = np.minimum(np.einsum("ij,j,ij->i", u, shrink, u), 1 - 1e-9)
        error = float(np.mean((residual / (1 - leverage)) ** 2))
        if error < best[0]:
            best = (error, penalty, vt.T @ (s / (s**2 + penalty) * projected))
    return best[1], best[2]


def _features(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Vector:
    """[prompts, 4 + tokens]: length, its logarithm and square, distinct tokens, and counts of frequent tokens."""
    column = {token: 4 + index for index, token in enumerate(tokens)}
    matrix = np.zeros((len(prompts), 4 + len(tokens)))
    for row, prompt in enumerate(prompts):
        size = len(prompt)
        matrix[row, :4] = size, math.log(size + 1), size**2, len(set(prompt))
        for token, count in Counter(prompt).items():
            if token in column:
                matrix[row, column[token]] = count
    return matrix


def spearman(predicted: Sequence[float], observed: Sequence[float]) -> float | None:
    """Spearman's rank correlation (ties take their mean rank); None where either side is constant."""
    x, y = _ranks(predicted), _ranks(observed)
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Sequence[float]) -> Vector:
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse], dtype=np.float64)
