"""Closed forms of the log-normal distribution, capped at a budget: what prediction, censoring and planning share.

Throughout, ln X ~ N(mu, sd^2); `cap` is the response budget in tokens and a length is min(X, cap) where it says so.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

Vector = NDArray[np.float64]


def capped_mean(mu: Vector, sd: Vector | float, cap: float) -> Vector:
    """E[min(X, cap)], in (0, cap]; rises with mu. `sd` may be 0 (X is then exp(mu)).

    = e^(mu + sd^2/2) Phi(a - sd) + cap (1 - Phi(a)) with a = (ln cap - mu) / sd: the partial expectation of a
    log-normal variable below the cap (Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 1, ch. 14).
    """
    mean = np.asarray(mu, dtype=np.float64)
    spread = np.broadcast_to(np.asarray(sd, dtype=np.float64), mean.shape)
    safe = np.maximum(spread, 1e-12)
    room = (np.log(cap) - mean) / safe
    below = np.exp(np.minimum(mean + spread**2 / 2 + log_ndtr(room - spread), np.log(cap)))
    value = np.where(spread > 0, below + cap * ndtr(-room), np.exp(np.minimum(mean, np.log(cap))))
    return np.asarray(np.minimum(value, cap), dtype=np.float64)


def capped_quantile(mu: Vector, sd: Vector | float, share: float, cap: float) -> Vector:
    """The `share` quantile of min(X, cap), in (0, cap]."""
    return np.asarray(np.exp(np.minimum(mu + sd * ndtri(share), np.log(cap))), dtype=np.float64)


def tail(bound: Vector) -> tuple[Vector, Vector]:
    """Mean and second moment of a standard normal variable given that it is above `bound`.

    m = phi(b) / (1 - Phi(b)) (the inverse Mills ratio) and 1 + b m (ibidem, ch. 13); in logarithms, so that a bound
    far out stays finite."""
    b = np.asarray(bound, dtype=np.float64)
    m = np.exp(-(b**2) / 2 - np.log(np.sqrt(2 * np.pi)) - log_ndtr(-b))
    return m, 1 + b * m
