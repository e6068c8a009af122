"""The one function that the learner calls: correction, policy loss and KL term of each token.

Invariants:
- loss = weight x policy loss + kl_coefficient x KL. The correction does not weigh the KL term.
- At masked positions loss, weight and every statistic are 0 and the gradient is 0, whatever the inputs hold there; a
  micro-batch of masked tokens alone still has a graph for its backward pass.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forebay.config.algorithm import AlgorithmConfig, Correction
from forebay.errors import RunError
from forebay.training.algorithms.corrections import correct
from forebay.training.algorithms.kl import kl_tokens
from forebay.training.algorithms.policy_losses import PolicyLoss, cispo, gspo, ppo
from forebay.training.algorithms.tokens import kept


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The data of R tokens; log-probabilities and advantages float32, without gradient."""

    behaviour: Tensor
    """Log-probabilities under the policy that sampled them, as the engine returned them."""
    advantages: Tensor
    sequence: Tensor
    """int64."""
    mask: Tensor
    """bool: trained."""
    proximal: Tensor | None = None
    """Log-probabilities under the trainer before the update. None: the batch makes one update, so they are those that
    the loss is made of, detached."""
    reference: Tensor | None = None
    """Log-probabilities under the reference model, for a KL term in the loss."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Each tensor (R,)."""

    loss: Tensor
    """Carries the gradient; to be weighted and divided (`aggregation`)."""
    ratio: Tensor
    """Of the policy loss, before its clip; 1 where masked."""
    clipped: Tensor
    """bool: the policy loss's clip is active (`PolicyLoss.clipped`)."""
    weight: Tensor
    """Of the correction."""
    correction: Correction
    """The active one."""
    stats: dict[str, Tensor]
    """Sums over unmasked tokens, 0-dimensional float64, always the same keys; divided by the batch's trained tokens
    they are shares and means: clipped, correction_weight, correction_clipped, correction_masked, correction_rejected,
    kl (the estimate, without coefficient); router_balance (also without) if the routers have a loss."""


def token_loss(logprobs: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """`logprobs` (R,) are the trainer's, with gradient. Raises `RunError` if the loss has a KL term and there is no
    reference."""
    mask = inputs.mask
    logprobs, behaviour, advantages = (kept(x, mask) for x in (logprobs, inputs.behaviour, inputs.advantages))
    proximal = logprobs.detach() if inputs.proximal is None else kept(inputs.proximal, mask)
    name = config.active_correction
    correction = correct(
        name,
        proximal,
        behaviour,
        inputs.sequence,
        mask,
        low=config.correction_low,
        high=config.correction_high,
    )
    old = behaviour if name == "behaviour" else proximal
    policy = _policy_loss(logprobs, old, advantages, inputs.sequence, mask, config)
    loss = correction.weight * policy.loss
    kl = torch.zeros_like(loss)
    if config.kl == "loss":
        if inputs.reference is None:
            raise RunError("algorithm.kl: a KL term in the loss needs log-probabilities of the reference model")
        kl = kl_tokens(logprobs, kept(inputs.reference, mask), config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    sums = {"clipped": policy.clipped, "correction_weight": correction.weight, "kl": kl.detach()}
    stats = {key: value.sum(dtype=torch.float64) for key, value in sums.items()} | {
        "correction_clipped": correction.clipped,
        "correction_masked": correction.masked,
        "correction_rejected": correction.rejected,
    }
    return TokenLoss(loss, policy.ratio.where(mask, 1.0), policy.clipped, correction.weight, name, stats)


def with_router_loss(token: TokenLoss, balance: Tensor, mask: Tensor, coefficient: float) -> TokenLoss:
    """`coefficient` x the routers' loss of each token's sequence, (R,), on top: weighted and divided as the rest is."""
    balance = kept(balance, mask)
    stats = token.stats | {"router_balance": balance.detach().sum(dtype=torch.float64)}
    return replace(token, loss=token.loss + coefficient * balance, stats=stats)


def _policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: AlgorithmConfig
) -> PolicyLoss:
    low, high = config.clip_low, config.clip_high
    if config.policy_loss == "gspo":
        return gspo(logprobs, old, advantages, sequence, mask, clip_low=low, clip_high=high)
    if config.policy_loss == "cispo":
        return cispo(logprobs, old, advantages, clip_low=low, clip_high=high)
    return ppo(logprobs, old, advantages, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
