"""The ceiling: the rank correlation that a perfect predictor would have, one that knows each prompt's expected length.

It is judged, like every predictor, by the mean of a few responses to each prompt, which is a noisy sign of what was to
be expected; so even the truth does not correlate perfectly with it. How noisy it is shows in how well two halves of
the responses agree:

1. rho = Spearman's correlation over prompts of the means of two random halves of m responses each; its mean over many
   splits.
2. r = 2 sin(pi rho / 6), Pearson's correlation of the underlying normal scores (Pearson, 1907), since reliability
   adds up in these, not in ranks.
3. R = (k/m) r / (1 + (k/m - 1) r): correlation of means of k responses with other means of k responses (Spearman 1910,
   Brown 1910).
4. sqrt(R): correlation of the mean of k responses with its expectation (Spearman, 1904: the attenuation formula).
5. Back to ranks: Spearman 6/pi asin(sqrt(R) / 2), Kendall 2/pi asin(sqrt(R)).

Exact where normal scores of true mean and noise are additive and normal. On log-normal lengths it is within sampling
error of the truth while the spread within a prompt is small (0.35), and up to 0.05 too high when it is large (1.2),
since means of few such responses gain less from more of them than step 3 says: the share that a predictor reaches then
comes out too low rather than too high.
"""

import math
from dataclasses import dataclass

import numpy as np

from forebay.lengths.prompts import Observed, Vector

SPLITS = 100


@dataclass(frozen=True)
class Ceiling:
    """Rank correlations of a perfect predictor, in [0, 1]."""

    spearman: float
    kendall: float


def ceiling(observed: Observed, seed: int = 0) -> Ceiling | None:
    """None if it cannot be told: fewer than two responses a prompt, or nothing differs between prompts.

    Only prompts with the full number of responses count.
    """
    responses = int(observed.counts.max(initial=0))
    half = responses // 2
    full = np.flatnonzero(observed.counts == responses)
    if not half or len(full) < 3:
        return None
    lengths = observed.lengths[np.isin(observed.owner, full)].reshape(len(full), responses)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(SPLITS):
        order = rng.permuted(np.tile(np.arange(responses), (len(full), 1)), axis=1)
        mixed = np.take_along_axis(lengths, order, axis=1)
        rho = spearman(mixed[:, :half].mean(axis=1), mixed[:, half : 2 * half].mean(axis=1))
        if rho is not None:
            found.append(rho)
    if not found:
        return None
    r = max(0.0, 2 * math.sin(math.pi * float(np.mean(found)) / 6))
    more = responses / half
    true = math.sqrt(min(1.0, more * r / (1 + (more - 1) * r)))
    return Ceiling(6 / math.pi * math.asin(true / 2), 2 / math.pi * math.asin(true))


def spearman(predicted: Vector, observed: Vector) -> float | None:
    """Spearman's rank correlation (ties take their mean rank); None where either side is constant."""
    from scipy.stats import rankdata

    if len(predicted) < 2:
        return None
    x, y = rankdata(predicted), rankdata(observed)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def kendall(predicted: Vector, observed: Vector) -> float | None:
    """Kendall's tau-b; None where either side is constant."""
    from scipy.stats import kendalltau

    value = float(kendalltau(predicted, observed).statistic) if len(predicted) > 1 else math.nan
    return value if math.isfinite(value) else None
