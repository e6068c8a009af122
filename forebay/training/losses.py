"""The policy loss, token by token.

Invariants:
- The ratio is taken against the policy that produced the token (the engine's own log-probabilities), never against
  recomputed ones: one clip then bounds both staleness and the mismatch between engine and trainer.
- Nothing here averages: the caller divides by the tokens of the global batch.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside any clip range, and still finite in the gradient."""


def clipped_policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(loss, ratio), each of shape (tokens,), float32.

    loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(logprobs - behaviour)
    (PPO, arXiv 1707.06347, equation 7; the two bounds apart: DAPO's clip-higher, arXiv 2503.14476, equation 10).
    """
    ratio = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio


def clipped_tokens(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True where the clip is active, that is where the token gives no gradient."""
    return ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))


def divergence(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """Estimate of KL(behaviour || policy) at each token sampled from `behaviour`: exp(d) - 1 - d, d = difference.

    Unbiased and never negative (Schulman, "Approximating KL divergence", 2020, estimator k3).
    """
    difference = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1.0 - difference
