"""DeepSpeed ZeRO 0 to 3 as a `Backend`; what it takes beyond DeepSpeed's public calls is in `zero`.

Invariants:
- Under ZeRO-2 and 3 each backward pass is a collective, under ZeRO-3 each forward pass too.
- Stages differ in what they partition, not in what they compute.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forebay.config import RunConfig
from forebay.training.backend import adamw, allocate, pack_state, share_buffers, unpack_state
from forebay.training.distributed import Ranks
from forebay.training.zero import (
    PlainStep,
    deepspeed_config,
    mark_leaves,
    masters,
    masters_to_model,
    partition,
    scaled_step,
    stage_of,
)


class DeepSpeedBackend:
    """See `Backend`."""

    def __init__(self, module: nn.Module, config: RunConfig, ranks: Ranks) -> None:
        import deepspeed

        self._ranks, dtype = ranks, getattr(torch, config.model.dtype)
        settings = deepspeed_config(config, cuda=ranks.device.type == "cuda")
        if stage_of(config) == 3:
            partition(module, settings, ranks.device, dtype)
            mark_leaves(module)
        else:
            # DeepSpeed sends rank 0's values.
            for _ in allocate(module.modules(), ranks.device, dtype):
                pass
        share_buffers(module, ranks.device)
        optimizer = adamw(module, {p: p for p in module.parameters()}, config.training)
        self._plain = None if stage_of(config) else PlainStep(optimizer, config.training.grad_clip)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def forward(self, batch: Any) -> Any:
        """See `Backend.forward`."""
        return self._engine(batch)

    def evaluate(self, batch: Any) -> Any:
        """See `Backend.evaluate`."""
        with torch.no_grad():
            return self._engine(batch)

    def backward(self, loss: Tensor) -> None:
        """See `Backend.backward`."""
        # DeepSpeed takes the mean of the ranks' gradients.
        self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)

    def step(self, divisor: float, learning_rate: float) -> float:
        """See `Backend.step`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._plain is None:
            return scaled_step(self._engine, divisor)
        self._plain.divisor = divisor
        self._engine.step()
        return self._plain.norm

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """See `Backend.gather`."""
        from deepspeed.runtime.zero import GatheredParameters

        copies = []
        for tensor in tensors:
            # One by one: of several, DeepSpeed has what the ranks sent and what it makes of it at the same time.
            with GatheredParameters([tensor] if isinstance(tensor, nn.Parameter) else [], modifier_rank=None):
                if self._ranks.rank == 0:
                    copies.append(tensor.detach().to("cpu", dtype, copy=True))
        return copies

    def state(self) -> dict[str, Tensor]:
        """See `Backend.state`."""
        return pack_state(*masters(self._engine.optimizer))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See `Backend.load_state`."""
        unpack_state(state, *masters(self._engine.optimizer))
        masters_to_model(self._engine.optimizer)
