"""Advantages from the rewards of a group, and whitening over the whole batch. No torch.

Invariants:
- The advantages of a group sum to zero, so a group without reward spread teaches nothing.
- Whitening works from sums that add, so it does not depend on the split into ranks, chunks and micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_FLOOR = 1e-6
"""Added to a group's standard deviation; keeps a tiny spread finite without changing an ordinary one."""
VARIANCE_FLOOR = 1e-8
"""Added to the variance of the batch, as in verl's and TRL's whitening."""

GroupAdvantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


def group_advantages(rewards: Sequence[float], kind: GroupAdvantage) -> NDArray[np.float64]:
    """One advantage for each response of one group; shape (n,). Zeros for fewer than two responses or equal rewards.

    `grpo`: (r - mean) / (std + 1e-6), outcome supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The
    paper does not say which deviation; this is the unbiased one (divisor n - 1), as in verl and TRL.
    `dr_grpo`: r - mean (arXiv 2503.20783): no division, so hard and easy prompts are not weighted up.
    `rloo`: r - mean of the others = n / (n - 1) (r - mean) (arXiv 2402.14740): the baseline is independent of r.
    `reinforce_baseline`: r - mean, to be whitened over the batch (REINFORCE++ with baseline, arXiv 2501.03262).
    """
    values = np.asarray(rewards, dtype=np.float64)
    count = values.size
    if count < 2 or np.ptp(values) == 0.0:
        return np.zeros(count)
    centred: NDArray[np.float64] = values - values.mean()
    if kind == "grpo":
        centred /= values.std(ddof=1) + STD_FLOOR
    elif kind == "rloo":
        centred *= count / (count - 1)
    return centred


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares over the trained tokens of any part of a batch; parts add up."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: ArrayLike, counts: ArrayLike = 1.0) -> "Moments":
        """Of values (n,), each counted `counts` (n,) times: a response's advantage once for each of its tokens."""
        x = np.asarray(values, dtype=np.float64)
        times = np.broadcast_to(np.asarray(counts, dtype=np.float64), x.shape)
        return cls(float(times.sum()), float((times * x).sum()), float((times * x * x).sum()))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Unbiased (divisor n - 1); 0 of fewer than two. Good to about 1e-15 of the mean square: enough for advantages,
        whose mean is not far from zero."""
        if self.count < 2:
            return 0.0
        return max(self.squares - self.total * self.mean, 0.0) / (self.count - 1)

    @property
    def scale(self) -> float:
        """What a centred value is multiplied by: 1 / sqrt(variance + 1e-8)."""
        return 1.0 / math.sqrt(self.variance + VARIANCE_FLOOR)

    def whiten(self, values: ArrayLike) -> NDArray[np.float64]:
        """(values - mean) / sqrt(variance + 1e-8). Of a single token, or of equal values: 0."""
        centred: NDArray[np.float64] = np.asarray(values, dtype=np.float64) - self.mean
        return centred * self.scale
