"""What a step measures on its way, kept on the device until the end.

Invariants: sums and maxima only, so that micro-batches and ranks add up; nothing waits for the device before `result`;
no gradient.
"""

import torch
from torch import Tensor

from forebay.training.algorithms.mismatch import Mismatch
from forebay.training.algorithms.token_loss import TokenLoss
from forebay.training.algorithms.tokens import kept
from forebay.training.distributed import Ranks
from forebay.training.packing import MicroBatch

BALANCE = "router_balance"
"""The routers' load-balancing loss: the number of experts for each token if all is even. Only if it is trained."""
SHARES = {
    "clipped": "clip_fraction",
    "correction_weight": "correction/weight_mean",
    "correction_clipped": "correction/clipped",
    "correction_masked": "correction/masked",
    "correction_rejected": "correction/rejected",
    "kl": "kl_mean",
    BALANCE: BALANCE,
}
"""Statistic of `TokenLoss` -> metric: its mean over the batch's response tokens."""


class Meter:
    """Of one step on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3 + len(SHARES), dtype=torch.float64, device=device)
        self._ratio = torch.zeros(1, dtype=torch.float64, device=device)
        self._mismatch, self._off_policy = Mismatch.empty(device), Mismatch.empty(device)

    @torch.no_grad()
    def add(self, micro: MicroBatch, loss: Tensor, proximal: Tensor, entropy: Tensor, token: TokenLoss) -> None:
        """A micro-batch; `loss` is its weighted sum, `proximal` the trainer's log-probabilities before the step."""
        mask = micro.weights > 0
        advantages = kept(micro.advantages, mask).abs().sum(dtype=torch.float64)
        sums = [loss.double(), kept(entropy, mask).sum(dtype=torch.float64), advantages]
        none = torch.zeros_like(sums[0])
        self._sums += torch.stack([*sums, *(token.stats.get(name, none) for name in SHARES)])
        self._ratio = torch.maximum(self._ratio, kept(token.ratio, mask).max().double())
        self._mismatch.add(micro.behaviour, proximal, mask & micro.current)
        self._off_policy.add(micro.behaviour, proximal, mask)

    def result(self, ranks: Ranks, tokens: int, divisor: float) -> dict[str, float]:
        """Of all ranks, so far; `tokens` and `divisor`: of all updates of the step, so far. `off_policy/*` is of all
        tokens, `mismatch/*` of those that the version in training made, if there are any."""
        apart = (self._mismatch, self._off_policy)
        sums = ranks.sum(torch.cat([self._sums, *(m.sums for m in apart)]).cpu())
        maxima = ranks.max(torch.cat([self._ratio, *(m.maxima for m in apart)]).cpu())
        own, *differences = torch.split(sums, [len(self._sums), 6, 6])
        ratio, *largest = maxima
        loss, entropy, advantages, *shares = own.tolist()
        metrics = {
            "loss": loss / divisor,
            "entropy": entropy / tokens,
            "advantage_abs_mean": advantages / tokens,
            "ratio_max": float(ratio),
        }
        metrics |= {metric: share / tokens for metric, share in zip(SHARES.values(), shares, strict=True)}
        if not metrics[BALANCE]:
            del metrics[BALANCE]
        for name, difference, most in zip(("mismatch", "off_policy"), differences, largest, strict=True):
            metrics |= Mismatch(difference, most).result(name)
        return metrics
