"""Generalised advantage estimation over packed sequences, for PPO with a critic.

Invariants:
- Nothing flows from one sequence into another, nor through a masked token: the recursion passes over it undiscounted,
  as if it were not there.
- Returns are made of advantages before whitening.
"""

import torch
from torch import Tensor

from forebay.training.algorithms.advantages import Moments
from forebay.training.algorithms.tokens import kept, last_tokens


def token_rewards(outcome: Tensor, sequence: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """(R,): the reward of a response (`outcome`, repeated at its tokens) at its last unmasked token, 0 before; plus
    `penalty` (`kl.reward_penalty`) at every unmasked token. A response without unmasked tokens gets none."""
    rewards = kept(outcome, last_tokens(sequence, mask))
    return rewards if penalty is None else rewards + kept(penalty, mask)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, sequence: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each (R,), 0 at masked tokens. Computed in float64 on the CPU.

    Over the unmasked tokens t of a sequence (arXiv 1506.02438, equation 16, as its recursion):
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t; V and A behind the
    last token are 0. V_t is the critic's value of the state before token t.
    """
    where = mask.cpu()
    r, v, of = (x.detach().cpu()[where].tolist() for x in (rewards.double(), values.double(), sequence))
    found = [0.0] * len(r)
    advantage = following = 0.0
    for t in reversed(range(len(r))):
        if t + 1 == len(r) or of[t] != of[t + 1]:
            advantage = following = 0.0
        advantage = r[t] + gamma * following - v[t] + gamma * lam * advantage
        following = v[t]
        found[t] = advantage
    advantages = torch.zeros(len(where), dtype=torch.float64)
    advantages[where] = torch.tensor(found, dtype=torch.float64)
    advantages = advantages.to(values.device)
    returns = kept(advantages + values, mask)
    return advantages.to(values.dtype), returns.to(values.dtype)


def moments(advantages: Tensor, mask: Tensor) -> Moments:
    """The sums that whitening needs, over the unmasked tokens; add them up over ranks and micro-batches."""
    return Moments.of(advantages[mask].double().cpu().numpy())


def whiten(advantages: Tensor, mask: Tensor, batch: Moments) -> Tensor:
    """(advantages - mean) / sqrt(variance + 1e-8) with the moments of the whole batch; 0 at masked tokens."""
    return kept(((advantages.double() - batch.mean) * batch.scale).to(advantages.dtype), mask)
