"""What observed lengths, some of them cut off, say of prompts: a log-normal model with one location for each prompt.

ln L_ij = mu_i + e_ij with mu_i ~ N(prior_i, between^2) and e_ij ~ N(0, within^2); a truncated response says only that
ln L_ij is above its observed value (right-censored). Estimation by the EM algorithm for censored normal data (Dempster,
Laird and Rubin, 1977, section 4.2): cut-off values are replaced by their expectation under the current parameters.
Without truncation everything is in closed form.
"""

import math
from dataclasses import dataclass

import numpy as np

from forebay.lengths.lognormal import tail
from forebay.lengths.prompts import Observed, Vector

LEAST_VARIANCE = 1e-8
"""Below this (a spread of 0.01%) a variance counts as this: constant lengths divide by it."""
ROUNDS = 200
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Spread:
    """Of log lengths."""

    location: float
    between: float
    """Standard deviation between prompts."""
    within: float
    """And between the responses to one prompt."""


@dataclass(frozen=True)
class Posterior:
    """What is known of each prompt's log location, [P] each."""

    location: Vector
    variance: Vector
    target: Vector
    """Mean log length of the prompt's responses, cut-off ones at their expectation; NaN for a prompt without any."""


def estimate(observed: Observed) -> Spread:
    """Method of moments, then EM if anything is truncated. With one response a prompt at most, the two spreads cannot
    be told apart: each gets half of the variance."""
    logs, owner, counts = np.log(observed.lengths), observed.owner, observed.counts
    answered = counts > 0
    means = _mean_by_owner(observed, logs)[answered]
    location, total = float(means.mean()), float(means.var(ddof=1)) if len(means) > 1 else 0.0
    free = len(logs) - len(means)
    if not free:
        return Spread(location, math.sqrt(total / 2), math.sqrt(total / 2))
    residual = logs - _mean_by_owner(observed, logs)[owner]
    within = float(residual @ residual) / free
    between = max(total - within * float(np.mean(1 / counts[answered])), 0.0)
    if observed.truncated.any():
        location, between, within = _maximise(observed, location, between, within)
    return Spread(location, math.sqrt(between), math.sqrt(within))


def posterior(observed: Observed, prior: Vector | float, between: Vector | float, within: float) -> Posterior:
    """Each prompt's location given its responses: the most likely value and the variance around it.

    `prior` and `between` may be one for all or one for each prompt. A prompt without responses keeps its prior.
    """
    counts = observed.counts
    mean = np.broadcast_to(np.asarray(prior, dtype=np.float64), counts.shape)
    spread = np.maximum(np.broadcast_to(np.asarray(between, dtype=np.float64), counts.shape) ** 2, LEAST_VARIANCE)
    noise = max(within**2, LEAST_VARIANCE)
    variance = 1 / (1 / spread + counts / noise)
    logs = np.log(observed.lengths)
    location, target = mean, _mean_by_owner(observed, logs)
    for _ in range(ROUNDS):
        target = _mean_by_owner(observed, _completed(observed, logs, location, noise)[0])
        found = variance * (mean / spread + counts * np.nan_to_num(target) / noise)
        change = float(np.max(np.abs(found - location), initial=0.0))
        location = found
        if change < TOLERANCE or not observed.truncated.any():
            break
    return Posterior(location, variance, target)


def _maximise(observed: Observed, location: float, between: float, within: float) -> tuple[float, float, float]:
    """Location, variance between and within prompts, by EM from these first values."""
    logs = np.log(observed.lengths)
    answered = observed.counts > 0
    for _ in range(ROUNDS):
        found = posterior(observed, location, math.sqrt(between), math.sqrt(within))
        mu, variance = found.location, found.variance
        noise = max(within, LEAST_VARIANCE)
        full, doubt = _completed(observed, logs, mu, noise)
        before = (location, between, within)
        location = float(mu[answered].mean())
        between = float(np.mean((mu[answered] - location) ** 2 + variance[answered]))
        within = float(np.mean((full - mu[observed.owner]) ** 2 + variance[observed.owner] + doubt))
        if max(abs(a - b) for a, b in zip(before, (location, between, within), strict=True)) < TOLERANCE:
            break
    return location, between, within


def _completed(observed: Observed, logs: Vector, location: Vector, noise: float) -> tuple[Vector, Vector]:
    """Log lengths with those of truncated responses at their expectation, and the variance that this hides."""
    cut = observed.truncated
    full, doubt = logs.copy(), np.zeros_like(logs)
    if cut.any():
        sd = math.sqrt(noise)
        mu = location[observed.owner[cut]]
        first, second = tail((logs[cut] - mu) / sd)
        full[cut] = np.maximum(mu + sd * first, logs[cut])
        doubt[cut] = noise * np.maximum(second - first**2, 0.0)
    return full, doubt


def _mean_by_owner(observed: Observed, values: Vector) -> Vector:
    counts = observed.counts
    sums = np.bincount(observed.owner, weights=values, minlength=observed.prompts)
    return np.asarray(np.divide(sums, counts, out=np.full(observed.prompts, np.nan), where=counts > 0))
