"""Predictions of response lengths that learn while the run goes on. Pure: no clock, no torch, no files.

Two corrections, both of a prompt's predicted mean length:
- *Drift*: finished groups leave a running residual ln(observed / predicted) for each bucket of predicted length (half
  powers of two), so that predictions follow the policy as it learns to answer longer or shorter.
- *Group*: responses of one prompt are alike. Those that are finished, and how far the others have come, sharpen the
  prediction of the rest.

The group model: ln length = m + e with m ~ N(ln predicted - w/2, b) once for each group and e ~ N(0, w) for each
response; the variances w and b are estimated from the groups that have finished. A running response is censored at the
tokens it has: its expected logarithm takes the place of an observation (two steps of expectation maximisation).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 0.98
"""Weight of a bucket's past when a group is added to it: about the last 50 groups count."""
PRIOR_GROUPS = 4.0
"""A bucket starts as if so many groups had shown no residual of its own."""
WITHIN, BETWEEN = 0.35, 0.5
"""Standard deviations of ln length, before anything is known: between the responses to a prompt, and of a prompt's
mean about its prediction."""


@dataclass(slots=True)
class _Running:
    """A mean that forgets; `weight` groups stand behind it."""

    mean: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = MEMORY * self.weight + 1.0
        self.mean += (value - self.mean) / self.weight


class LengthCorrection:
    """Learns from finished groups; lengths in tokens, never above `longest` (the response budget)."""

    def __init__(self, longest: float = math.inf) -> None:
        self._longest = longest
        self._all = _Running()
        self._buckets: dict[int, _Running] = {}
        self._within = _Running(WITHIN**2, PRIOR_GROUPS)
        self._between = _Running(BETWEEN**2, PRIOR_GROUPS)

    def expected(self, predicted: float) -> float:
        """The mean length that a prompt with this prediction has by now."""
        return self._capped(predicted * math.exp(self._residual(_bucket(predicted))))

    def observed(self, predicted: float, lengths: Sequence[int]) -> None:
        """A whole group is finished."""
        logs = [math.log(length or 1) for length in lengths]
        mean = sum(logs) / len(logs)
        residual = math.log(max(sum(lengths) / len(lengths), 1.0) / max(predicted, 1.0))
        bucket = _bucket(predicted)
        self._between.add((residual - self._residual(bucket)) ** 2)
        if len(logs) > 1:
            self._within.add(sum([(value - mean) ** 2 for value in logs]) / (len(logs) - 1))
        self._all.add(residual)
        if bucket not in self._buckets:
            self._buckets[bucket] = _Running()
        self._buckets[bucket].add(residual)

    def rest(self, predicted: float, finished: Sequence[int], running: int, reached: int) -> float:
        """Mean length, in the end, of a group's `running` responses, each of which has at least `reached` tokens."""
        within = max(self._within.mean, 1e-4)
        between = max(self._between.mean, 1e-4)
        prior = math.log(max(self.expected(predicted), 1.0)) - within / 2
        known = sum(math.log(max(length, 1)) for length in finished)
        spread, floor = math.sqrt(within), math.log(max(reached, 1))
        centre = prior
        for _ in range(2):
            censored = centre + spread * _hazard((floor - centre) / spread) if reached > 1 else centre
            weight = len(finished) + (running if reached > 1 else 0)
            total = known + (running * censored if reached > 1 else 0.0)
            centre = (prior / between + total / within) / (1 / between + weight / within)
        above = _tail((floor - centre) / spread)
        ratio = _tail((floor - centre) / spread - spread) / above if above > 1e-12 else math.inf
        mean = math.exp(min(centre + within / 2, 50.0)) * ratio if math.isfinite(ratio) else reached * math.exp(spread)
        return self._capped(max(mean, float(reached)))

    def _residual(self, bucket: int) -> float:
        """Of the bucket, drawn towards that of all groups, which is drawn towards none."""
        overall = self._all.mean * self._all.weight / (self._all.weight + PRIOR_GROUPS)
        own = self._buckets.get(bucket)
        if own is None:
            return overall
        return (own.mean * own.weight + overall * PRIOR_GROUPS) / (own.weight + PRIOR_GROUPS)

    def _capped(self, length: float) -> float:
        return min(max(length, 1.0), self._longest)


def _bucket(predicted: float) -> int:
    return math.floor(2 * math.log2(max(predicted, 1.0)))


def _tail(z: float) -> float:
    """P(Z > z) of the standard normal distribution."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def _hazard(z: float) -> float:
    """E[Z | Z > z] (the inverse Mills ratio); about z for large z."""
    tail = _tail(z)
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / tail if tail > 1e-12 else z
