"""PyTorch's `fully_shard` (FSDP2) as a `Backend`: parameters are cut along their first dimension and gathered layer by
layer.

Invariants:
- Trained weights, gradients and moments are float32; with bfloat16 the layers are gathered and computed in it, and
  frozen weights are kept in it.
- Each forward and backward pass is a collective.
- Outside of them the module holds shards: what was gathered for a pass without gradients is given back, or the next
  one would compute with the weights of before the update.
- AdamW and clipping work on this rank's plain shards, which share their memory with the module's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.training.backend import adamw, allocate, pack_state, share, share_buffers, unpack_state
from forebay.training.distributed import Ranks

NORM_FLOOR = 1e-6
"""Added to the norm in the clipping factor, as in torch and DeepSpeed."""


class Fsdp2Backend:
    """See `Backend`."""

    def __init__(self, module: nn.Module, config: RunConfig, ranks: Ranks) -> None:
        self._ranks, self._clip = ranks, config.training.grad_clip
        self._module = _sharded(module, config, ranks)
        self._shards = {p: _local(p) for p in module.parameters() if p.requires_grad}
        self._optimizer = adamw(module, self._shards, config.training)

    def forward(self, batch: Any) -> Any:
        """See `Backend.forward`."""
        return self._module(batch)

    def evaluate(self, batch: Any) -> Any:
        """See `Backend.evaluate`."""
        with torch.no_grad():
            result = self._module(batch)
        self._module.reshard()
        return result

    def backward(self, loss: Tensor) -> None:
        """See `Backend.backward`."""
        torch.autograd.backward(loss)

    @torch.no_grad()
    def step(self, divisor: float, learning_rate: float) -> float:
        """See `Backend.step`."""
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else _local(parameter.grad)
        gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        # Each element is on one rank only.
        square = nn.utils.get_total_norm(gradients).double().square().cpu()
        norm = float(self._ranks.sum(square).sqrt()) / divisor
        # not max(): a norm that is not a number must not look like a small one
        factor = 1.0 if norm + NORM_FLOOR < self._clip else self._clip / (norm + NORM_FLOOR)
        for gradient in gradients:
            gradient.mul_(factor / divisor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None
        return norm

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """See `Backend.gather`."""
        copies = []
        for tensor in tensors:
            full = self._full(tensor.detach())
            if self._ranks.rank == 0:
                copies.append(full.to("cpu", dtype, copy=True))
        return copies

    def state(self) -> dict[str, Tensor]:
        """See `Backend.state`."""
        return pack_state(list(self._shards.values()), self._optimizer)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See `Backend.load_state`."""
        unpack_state(state, list(self._shards.values()), self._optimizer)

    def _full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # An offloaded shard goes to the device first: NCCL cannot see the CPU's memory.
        local = tensor.to_local().to(self._ranks.device)
        placed = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return placed.full_tensor()


def _sharded(module: nn.Module, config: RunConfig, ranks: Ranks) -> Any:
    bf16 = config.model.dtype == "bfloat16"
    options: dict[str, Any] = {
        "mesh": init_device_mesh(ranks.device.type, (ranks.world,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
        "offload_policy": OffloadPolicy(),
    }
    if config.training.offload == "all":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    share_buffers(module, ranks.device)
    for part, own in _parts(module):
        for parameter in allocate(own, ranks.device, torch.float32, getattr(torch, config.model.dtype)):
            share(parameter)
        fully_shard(part, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Gradients are sums; the division comes at the end.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def _parts(module: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """[(what is gathered together, its modules without those of the parts before)]: the blocks that the model's own
    class names, inner ones first, and what is left. Raises `UserError` for weights tied across parts: `fully_shard`
    would untie them."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    layers = [part for part in reversed(list(module.modules())) if type(part).__name__ in names]
    done: set[nn.Module] = set()
    parts = []
    part_of: dict[nn.Parameter, nn.Module] = {}
    for part in [*layers, module]:
        own = [inner for inner in part.modules() if inner not in done]
        done.update(own)
        parts.append((part, own))
        for parameter in (p for inner in own for p in inner.parameters(recurse=False)):
            if part_of.setdefault(parameter, part) is not part:
                raise UserError(
                    f"training.backend fsdp2 cannot train a model that ties weights across layers "
                    f"({type(part).__name__}): set training.backend=deepspeed"
                )
    return parts


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
