"""Predictors of response length behind one protocol: mean, median and an upper quantile of a group's lengths.

ln L of a response to prompt i is taken as N(mu_i, within^2 + v_i): a `Location` (one module for each) tells mu_i from
the prompt, v_i is the variance of its error, and what is known of the prompt's own responses sharpens both. The
retransformation from logarithms is that of the capped log-normal distribution, corrected so that it is right on
average; quantiles do not trust the normal distribution: they are those of held-out residuals.

Invariants: every prediction is finite, in [1, longest], and median <= upper.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from forebay.errors import RunError
from forebay.lengths.censored import LEAST_VARIANCE, posterior
from forebay.lengths.history import Responses
from forebay.lengths.lognormal import capped_mean
from forebay.lengths.prompts import Observed, Prompts, Vector, observe

ENOUGH = 16
"""Prompts with a history among the fitted ones from which its drift is learned; with fewer it is taken as it is."""
_FAR, _SLOPES = 20.0, (0.5, 2.0)


@dataclass(frozen=True)
class Predictions:
    """[P] tokens each, in [1, longest]."""

    mean: Vector
    median: Vector
    upper: Vector


class Predictor(Protocol):
    """Whatever predicts lengths."""

    def predict(self, prompts: Prompts) -> Predictions:
        """Of every prompt, whether it was seen before or not."""


class Location(Protocol):
    """Whatever tells the mean log length of a prompt's responses; it need not be calibrated."""

    def predict(self, prompts: Prompts) -> Vector:
        """[P] of natural logarithms of tokens."""


@dataclass(frozen=True)
class Known:
    """Responses to some prompts, by prompt id, and how they speak of today's."""

    responses: Mapping[str, Responses]
    offset: float = 0.0
    slope: float = 1.0
    """Today's location is offset + slope x the location that the responses tell."""
    variance: float | None = None
    """Of what is left then; None: as the responses themselves tell."""

    def sharpen(self, prompts: Prompts, mu: Vector, variance: Vector, within: float) -> tuple[Vector, Vector]:
        """Location and variance of each prompt, where its responses are known."""
        rows = np.array([i for i, name in enumerate(prompts.ids) if name in self.responses], dtype=np.int64)
        if not len(rows):
            return mu, variance
        observed = observe([self.responses[prompts.ids[i]] for i in rows])
        found = posterior(observed, mu[rows], np.sqrt(variance[rows]), within)
        mu, variance = mu.copy(), variance.copy()
        mu[rows] = self.offset + self.slope * found.location
        variance[rows] = found.variance if self.variance is None else self.variance
        return mu, variance


@dataclass(frozen=True)
class Calibrated:
    """A `Predictor`: a location with what is needed to make predictions of it."""

    location: Location
    longest: int
    """The response budget, in tokens."""
    within: float
    """Standard deviation of log length between the responses to one prompt."""
    error: float
    """And of the location's error."""
    known: tuple[Known, ...] = ()
    mean_offset: float = 0.0
    mean_slope: float = 1.0
    """For the mean alone a location counts as offset + slope x location."""
    median_score: float = 0.0
    upper_score: float = 0.0
    """Quantiles of the standardised residual of a response; infinite: the budget."""

    def predict(self, prompts: Prompts) -> Predictions:
        mu, sd = self.locate(prompts)
        top = math.log(self.longest)

        def tokens(logs: Vector) -> Vector:
            return np.where(logs < top, np.exp(np.clip(logs, 0.0, top)), float(self.longest))

        with np.errstate(invalid="ignore"):
            median, upper = tokens(mu + self.median_score * sd), tokens(mu + self.upper_score * sd)
        return Predictions(self.capped(self.mean_offset + self.mean_slope * mu, sd), median, upper)

    def capped(self, mu: Vector, sd: Vector) -> Vector:
        """Mean of a response cut off at the budget, in [1, longest]."""
        return np.clip(capped_mean(mu, sd, self.longest), 1.0, float(self.longest))

    def locate(self, prompts: Prompts) -> tuple[Vector, Vector]:
        """Mean and standard deviation of the log length of a response to each prompt; finite, sd > 0.

        Raises `RunError` for a location that is no number (weights that overflowed, say)."""
        told = self.location.predict(prompts)
        if (bad := np.flatnonzero(np.isnan(told))).size:
            raise RunError(
                f"lengths: the predictor gives no number for {bad.size:,} of {len(told):,} prompts (the first is "
                f"{prompts.ids[bad[0]]}): choose another lengths.predictor"
            )
        # A little beyond what can be observed, so that no exponential overflows.
        mu = np.clip(told, -1.0, math.log(self.longest) + 3)
        variance = np.full(len(prompts), max(self.error**2, LEAST_VARIANCE))
        for known in self.known:
            mu, variance = known.sharpen(prompts, mu, variance, self.within)
        return mu, np.sqrt(max(self.within**2, LEAST_VARIANCE) + variance)


def with_error(predictor: Calibrated, prompts: Prompts, observed: Observed) -> Calibrated:
    """With the error of its location on prompts that it did not see, beyond what the spread of responses explains."""
    found = posterior(observed, predictor.location.predict(prompts), 10.0, predictor.within)
    seen = observed.counts > 0
    residual = (found.target - predictor.location.predict(prompts))[seen]
    beyond = float(np.mean(residual**2 - predictor.within**2 / observed.counts[seen]))
    return replace(predictor, error=math.sqrt(max(beyond, 0.0)))


def with_mean(predictor: Calibrated, prompts: Prompts, observed: Observed) -> Calibrated:
    """With the line from location to the mean's location for which the predicted means have the mean of the observed
    ones, and, of these lines, the least chi-squared error.

    The slope is for spreads that grow with length, the offset for whatever else is not log-normal. Where no line will
    do (everything is truncated) it is as near as can be."""
    mu, sd = predictor.locate(prompts)
    means = observed.means()
    wanted = float(np.nanmean(means))

    def offset(slope: float) -> float:
        """By bisection: a capped mean rises with its location."""
        low, high = -_FAR, _FAR
        for _ in range(60):
            middle = (low + high) / 2
            mean = predictor.capped(middle + slope * mu, sd).mean()
            low, high = (middle, high) if mean < wanted else (low, middle)
        return (low + high) / 2

    def error(slope: float) -> float:
        mean = predictor.capped(offset(slope) + slope * mu, sd)
        return float(np.nanmean((means - mean) ** 2 / mean))

    slope = float(minimize_scalar(error, bounds=_SLOPES, method="bounded").x) if np.ptp(mu) > 1e-9 else 1.0
    return replace(predictor, mean_offset=offset(slope), mean_slope=slope)


def scores(predictor: Calibrated, prompts: Prompts, observed: Observed) -> Vector:
    """[R] standardised residuals of responses; of a truncated one, what it is at least."""
    mu, sd = predictor.locate(prompts)
    return np.asarray((np.log(observed.lengths) - mu[observed.owner]) / sd[observed.owner], dtype=np.float64)


def quantile(values: Vector, censored: NDArray[np.bool_], share: float, prompts: int) -> float:
    """The `share` quantile of values, some of which are only known to be at least what they are: the first at which the
    product-limit estimate (Kaplan and Meier, 1958) reaches it; infinite if it never does.

    Split conformal prediction: with n held-out prompts the share is raised by (n + 1) / n, so that on average the asked
    share of a new prompt's responses lies below (Dunn, Wasserman and Ramdas, 2023, for grouped data).
    """
    asked = min(share * (prompts + 1) / max(prompts, 1), 1.0)
    order = np.lexsort((censored, values))  # at ties the exact ones come first, as is usual
    at_risk = np.arange(len(values), 0, -1)
    survival = np.cumprod(np.where(censored[order], 1.0, 1 - 1 / at_risk))
    reached = np.flatnonzero((1 - survival >= asked - 1e-12) & ~censored[order])
    return float(values[order[reached[0]]]) if len(reached) else math.inf


def with_quantiles(predictor: Calibrated, prompts: Prompts, observed: Observed, upper: float) -> Calibrated:
    """With quantiles that hold on these held-out prompts."""
    values, answered = scores(predictor, prompts, observed), int(np.count_nonzero(observed.counts))
    median, high = (quantile(values, observed.truncated, share, answered) for share in (0.5, upper))
    return replace(predictor, median_score=median, upper_score=high)


def with_drift(known: Known, predictor: Calibrated, prompts: Prompts, observed: Observed) -> Known:
    """An earlier run's lengths, corrected by how today's differ from them: least squares of today's mean log length on
    what they tell, over the fitted prompts that they know; and how far off they are then."""
    target = posterior(observed, predictor.location.predict(prompts), 10.0, predictor.within).target
    here = np.array([name in known.responses for name in prompts.ids], dtype=np.bool_) & np.isfinite(target)
    told = replace(predictor, known=(known,)).locate(prompts)[0][here]
    if len(told) < ENOUGH or np.ptp(told) < 1e-9:
        return known
    slope, offset = np.polyfit(told, target[here], 1)
    residual = target[here] - offset - slope * told
    beyond = float(np.mean(residual**2 - predictor.within**2 / observed.counts[here]))
    return replace(known, offset=float(offset), slope=float(slope), variance=max(beyond, LEAST_VARIANCE))
