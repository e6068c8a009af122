"""The frozen start model, which the policy is not to go far from.

Invariants:
- It never changes and has no gradient. Each rank holds the whole of it.
- It runs on packed micro-batches as the policy does, so that equal weights give equal log-probabilities.
"""

import torch
from torch import Tensor, nn

from forebay.training.logprobs import PolicyModel
from forebay.training.packing import MicroBatch


class Reference:
    """`offload`: between two batches it lies in CPU memory."""

    def __init__(self, policy: PolicyModel, device: torch.device, offload: bool) -> None:
        self._policy, self._device, self._offload = policy.requires_grad_(False).eval(), device, offload
        self._move(torch.device("cpu") if offload else device)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """(R,) float32, at the rollout temperature."""
        self._move(self._device)
        logprobs: Tensor = self._policy(micro)[0]
        return logprobs

    def rest(self) -> None:
        """The batch is done."""
        if self._offload:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        nn.Module.to(self._policy, device)
