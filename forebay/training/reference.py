"""The frozen start model, which the policy is not to go far from: a copy, or what lies under a policy's adapters.

Invariants:
- It never changes and has no gradient. Each rank holds the whole of a copy.
- It runs on packed micro-batches as the policy does, so that equal weights give equal log-probabilities.
"""

import torch
from torch import Tensor, nn

from forebay.training.backend import Backend
from forebay.training.logprobs import PolicyModel
from forebay.training.lora import switched_off
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


class BaseReference:
    """A policy without its adapters: no second model. Each call is collective where a forward pass is."""

    def __init__(self, lm: nn.Module, backend: Backend) -> None:
        self._lm, self._backend = lm, backend

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """See `Reference.logprobs`."""
        with switched_off(self._lm):
            logprobs: Tensor = self._backend.evaluate(micro)[0]
        return logprobs

    def rest(self) -> None:
        """See `Reference.rest`: nothing is in the way."""
