"""Divergence of the policy from a reference, KL(policy || reference), estimated at sampled tokens.

Schulman, "Approximating KL divergence", 2020. With d = log policy - log reference at a token sampled from the policy:
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The value of k1 and k3 is unbiased; k2 is close for small d.

What each does as a term of the loss (its gradient in expectation over the policy's own samples) is another matter:
- k1: grad d = grad log p, whose expectation is 0. It restrains nothing and adds noise; use k1 in the reward.
- k2: d grad log p, which is the gradient of KL(policy || reference).
- k3: (1 - exp(-d)) grad log p, which is the gradient of KL(reference || policy), the other direction; equal to first
  order in d.
- k1 in the reward: the policy gradient of -coefficient x d is the gradient of -coefficient x KL(policy || reference).

Invariants:
- d is clamped to +-20, k3 is at most 10 (as in verl): a token that the reference finds e^20 times likelier must not
  drown the batch. Beyond a bound there is no gradient.
"""

from typing import Literal

import torch
from torch import Tensor

from forebay.training.algorithms.tokens import kept, log_ratio

MAX_K3 = 10.0

Estimator = Literal["k1", "k2", "k3"]


def kl_tokens(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """(R,) estimate at each token, with gradient through `logprobs`."""
    d = log_ratio(logprobs, reference)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    return ((-d).exp() - 1.0 + d).clamp(max=MAX_K3)


@torch.no_grad()
def reward_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """(R,): -coefficient x k1 at each token, 0 where masked; to be added to the tokens' rewards. Its sum over a
    response (`tokens.sequence_sum`) is added to the response's reward where there is only one for all its tokens.
    `logprobs` are the trainer's before the update."""
    return kept(-coefficient * kl_tokens(logprobs, reference, "k1"), mask)
