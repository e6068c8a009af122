"""Weights for samples that another policy made than the one that the trainer holds.

The engine that sampled a token (`behaviour`) differs from the trainer before its update (`proximal`) by age and by
numerics. w = proximal's probability / behaviour's.

Invariants:
- Weights carry no gradient.
- A weight of 0 keeps its token in the divisor of the loss: what is dropped does not weigh up the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.config.algorithm import Correction
from forebay.training.algorithms.tokens import MAX_LOG_RATIO, log_ratio, sequence_mean, sequence_sum


@dataclass(frozen=True, slots=True)
class Weights:
    """What a correction makes of R tokens. Counts are of unmasked tokens, 0-dimensional float64."""

    weight: Tensor
    """(R,), 0 where masked, detached."""
    clipped: Tensor
    """Tokens whose weight was cut down to the cap (`tis_token`, `tis_sequence`)."""
    masked: Tensor
    """Tokens that were given weight 0 for their own ratio (`icepop`)."""
    rejected: Tensor
    """Tokens that were given weight 0 with their whole response (`reject_sequence`)."""


@torch.no_grad()
def correct(
    name: Correction, proximal: Tensor, behaviour: Tensor, sequence: Tensor, mask: Tensor, *, low: float, high: float
) -> Weights:
    """The weight of each token's policy loss. The ratio of that loss is taken against `behaviour` for `behaviour`, for
    all others against `proximal`.

    `behaviour`, `none`: 1. In `behaviour` the clip of the ratio bounds staleness and mismatch together.
    `decoupled`: w (decoupled PPO: arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.2): the clip bounds the update
    alone, and w makes up for who sampled.
    `tis_token`: min(w, high) (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training").
    `tis_sequence`: min(product of w over the response, high) (Liu et al. 2025, "When Speed Kills Stability"): unbiased
    but for the cap, of a variance that grows with the length.
    `icepop`: w where low <= w <= high, else 0 (Ling team 2025, IcePop; Ring-1T, arXiv 2510.18855).
    `reject_sequence`: 1, or 0 for all of a response whose geometric mean of w is not within [low, high].
    """
    log_w = log_ratio(proximal, behaviour)
    w = log_w.exp()
    one, never = torch.ones_like(w), torch.zeros_like(mask)
    weight, clipped, masked, rejected = one, never, never, never
    if name == "decoupled":
        weight = w
    elif name == "tis_token":
        weight, clipped = w.clamp(max=high), w > high
    elif name == "tis_sequence":
        product = sequence_sum(log_w, sequence, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight, clipped = product.clamp(max=high), product > high
    elif name == "icepop":
        masked = ~((w >= low) & (w <= high))
        weight = w.where(~masked, 0.0)
    elif name == "reject_sequence":
        mean = sequence_mean(log_w, sequence, mask).exp()
        rejected = ~((mean >= low) & (mean <= high))
        weight = one.where(~rejected, 0.0)
    counts = [(flags & mask).sum(dtype=torch.float64) for flags in (clipped, masked, rejected)]
    return Weights(weight.to(w.dtype).where(mask, 0.0), *counts)
