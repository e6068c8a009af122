"""Policy losses, token by token.

Invariants:
- `old` is the policy that the ratio is taken against: the engine's log-probabilities or the trainer's before the
  update; `corrections` decides which.
- A loss is -A times something bounded, so no clip is active where A is 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.training.algorithms.tokens import MAX_LOG_RATIO, log_ratio, sequence_mean


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Each (R,)."""

    loss: Tensor
    """Carries the gradient."""
    ratio: Tensor
    """Probability ratio to the old policy, before any clip; detached."""
    clipped: Tensor
    """bool. `ppo`, `gspo`: the token gives no gradient. `cispo`: its weight is clipped; it still gives one."""


def ppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old).

    PPO, arXiv 1707.06347, equation 7; the two bounds apart: DAPO's clip-higher, arXiv 2503.14476, equation 10. With
    `dual_clip` c the loss is at most -c A where A < 0 (dual-clip PPO, arXiv 1912.09729): otherwise nothing bounds the
    loss of a token that has become far likelier and was bad.
    """
    bounded = log_ratio(logprobs, old)
    ratio = bounded.exp()
    loss, clipped = _clip(ratio, advantages, clip_low, clip_high, dual_clip)
    # Where the log-ratio itself is cut off, no gradient comes back either.
    beyond = ((logprobs - old).abs() > MAX_LOG_RATIO) & (advantages != 0)
    return PolicyLoss(loss, ratio.detach(), clipped | beyond)


def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """As `ppo` with the ratio of the sequence, s = exp(mean over its unmasked tokens of (logprobs - old)).

    GSPO, arXiv 2507.18071, equations 5 and 7, in the token form of equation 14: s_t = sg[s] p_t / sg[p_t]. Its value is
    s; its gradient s A grad(log p_t) makes, with `sequence_mean` aggregation and one advantage for all tokens, the same
    sum as the gradient through s. The paper's clips are small (0.0003 and 0.0004): s moves far less than token ratios.
    """
    mean = sequence_mean(logprobs.detach() - old, sequence, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = mean.exp().to(logprobs.dtype) * (logprobs - logprobs.detach()).exp()
    loss, clipped = _clip(ratio, advantages, clip_low, clip_high, None)
    return PolicyLoss(loss, ratio.detach(), clipped)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """loss = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs, r = exp(logprobs - old).

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): REINFORCE with clipped weights. Every token keeps its
    gradient, also the rare ones that PPO's clip silences.
    """
    ratio = log_ratio(logprobs.detach(), old).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, (weight != ratio) & (advantages != 0))


def _clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """(-A times the ratio within bounds, where the bound is active). For A > 0 only the upper bound can be the smaller
    term of PPO's min, for A < 0 only the lower one; the dual clip bounds those from above."""
    bounded = torch.where(
        advantages < 0, ratio.clamp(min=1.0 - clip_low, max=dual_clip), ratio.clamp(max=1.0 + clip_high)
    )
    return -advantages * bounded, (bounded != ratio).detach() & (advantages != 0)
