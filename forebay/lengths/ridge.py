"""Ridge regression whose penalty is chosen by its leave-one-out error; many columns and few rows are welcome."""

import math
from dataclasses import dataclass

import numpy as np

from forebay.lengths.prompts import Vector

PENALTIES = tuple(10.0**power for power in range(-2, 7))


@dataclass(frozen=True)
class Ridge:
    """Fitted by `fit_ridge`."""

    mean: Vector
    scale: Vector
    weights: Vector
    intercept: float
    penalty: float

    def predict(self, features: Vector) -> Vector:
        """[rows]. A feature that is not known (NaN) counts as its mean."""
        standard = np.nan_to_num((features - self.mean) / self.scale)
        return np.asarray(standard @ self.weights + self.intercept, dtype=np.float64)


def fit_ridge(features: Vector, target: Vector) -> Ridge:
    """`features` [rows, columns], standardised here; constant and unknown columns get no weight."""
    known = np.isfinite(features)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, features, 0.0).sum(axis=0) / count
    scale = np.sqrt(np.where(known, (features - mean) ** 2, 0.0).sum(axis=0) / count)
    scale[scale < 1e-9] = 1.0
    intercept = float(target.mean())
    penalty, weights = best_ridge(np.nan_to_num((features - mean) / scale), target - intercept)
    return Ridge(mean, scale, weights, intercept, penalty)


def best_ridge(features: Vector, target: Vector) -> tuple[float, Vector]:
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
