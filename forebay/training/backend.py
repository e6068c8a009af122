"""What the learner asks of whatever holds the weights, and what all backends share.

Invariants:
- A loss is a sum over this rank's tokens. Gradients add up over ranks, micro-batches and chunks and are divided once,
  in `step`, before norm and clipping: no split of a batch changes its update.
- All ranks make the same calls in the same order: most are collective.
- Every rank builds the same module. Only rank 0 needs to have its values; on the others parameters and buffers may be
  on the meta device, and no more of them is in memory at a time than what the backend partitions at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from forebay.adapters import DOWN, UP, WEIGHT, merged
from forebay.config.sections import TrainingConfig
from forebay.errors import RunError
from forebay.training.lora import Adapter, adapters, base_parameters

SHARD_BYTES = 2 << 30
"""Weights gathered, converted and written at a time."""
MASTER = "master"


class Backend(Protocol):
    """A module's weights, gradients and AdamW, spread over the ranks."""

    def forward(self, batch: Any) -> Any:
        """What the module returns for the batch; `backward` follows before the next one."""

    def evaluate(self, batch: Any) -> Any:
        """The same without gradients; nothing accumulated is touched."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's sum to the step's."""

    def step(self, divisor: float, learning_rate: float) -> float:
        """One update from the accumulated gradients / `divisor`; returns their norm before clipping. With a norm that
        is not finite the weights are of no use afterwards."""

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copies on the CPU of some of the module's parameters and buffers in full; rank 0 only, the others get none.
        Beyond its own part a rank's device holds one of them at a time."""

    def state(self) -> dict[str, Tensor]:
        """This rank's float32 weights and moments: `<i>.master`, and AdamW's `<i>.step`, `.exp_avg`, `.exp_avg_sq`
        once there was an update. Copies on the CPU; gradients are no part."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put it back. Raises `RunError` if it does not fit."""


def adamw(module: nn.Module, parameters: dict[nn.Parameter, Tensor], config: TrainingConfig) -> torch.optim.AdamW:
    """Over `parameters`: each trainable parameter of the module -> the tensor to optimise in its place. Matrices decay.

    Fused: one pass over the memory and no temporaries, on CPU (vectorised, so that offloading needs nothing compiled)
    as on CUDA."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    # Under ZeRO-3 a parameter is flat and empty; ds_shape is its own shape.
    matrices = [parameters[p] for p in trainable if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [parameters[p] for p in trainable if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, fused=True
    )


def allocate(
    modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype, frozen: torch.dtype | None = None
) -> Iterator[nn.Parameter]:
    """Each parameter that these modules own, once, on `device` and in `dtype` (a frozen one in `frozen`, if given); one
    on the meta device is replaced by an empty one, wherever among them it is tied to, when it is its turn."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for owner in modules:
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if (known := replaced.get(parameter)) is not None:
                setattr(owner, name, known)
                continue
            fresh, wanted = parameter, dtype if parameter.requires_grad else frozen or dtype
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device, dtype=wanted)
                fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(owner, name, fresh)
            else:
                parameter.data = parameter.data.to(device, wanted)
            replaced[parameter] = replaced[fresh] = fresh
            yield fresh


def share_buffers(module: nn.Module, device: torch.device) -> None:
    """Rank 0's buffers for all, saved ones or not, on `device`."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            fresh = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(owner, name, fresh)
            share(fresh)


def share(tensor: Tensor) -> None:
    """Rank 0's values for all, in place."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor.detach(), 0)


def full_shards(
    lm: PreTrainedModel, backend: Backend, dtype: torch.dtype, rank: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The full weights by hub name, in `dtype`, on the CPU, `SHARD_BYTES` at a time. Adapters are merged in.

    Every rank must exhaust it (gathering is collective); ranks other than 0 get empty lists.
    """
    adapter_of = {adapter.weight: adapter for adapter in adapters(lm)}
    for bucket in _buckets(lm, dtype.itemsize):
        values = backend.gather([tensor for _, tensor in bucket], dtype)
        full = dict(zip([name for name, _ in bucket], values, strict=True)) if rank == 0 else {}
        changed = [adapter_of[name] for name, _ in bucket if name in adapter_of]
        for adapter, down, up in _pairs(changed, backend):
            full[adapter.weight] = merged(full[adapter.weight], down, up, adapter.scale)
        yield [(n, t.contiguous()) for n, t in revert_weight_conversion(lm, full).items()] if full else []


def adapter_shard(lm: PreTrainedModel, backend: Backend) -> list[tuple[str, Tensor]]:
    """The adapters alone, named as `forebay.adapters` says, float32, on the CPU. All ranks together; ranks other than 0
    get an empty list."""
    shard = []
    for adapter, down, up in _pairs(adapters(lm), backend):
        # The name alone matters: the layers that take adapters are in the files as they are in memory.
        (name,) = revert_weight_conversion(lm, {adapter.weight: torch.empty(up.shape[0], down.shape[1], device="meta")})
        module = name.removesuffix(WEIGHT)
        shard += [(module + DOWN, down.contiguous()), (module + UP, up.contiguous())]
    return shard


def _pairs(wanted: Sequence[Adapter], backend: Backend) -> list[tuple[Adapter, Tensor, Tensor]]:
    """Each with its A and B in full, float32, on the CPU; rank 0 only, the others get none."""
    if not wanted:
        return []
    values = backend.gather([t for adapter in wanted for t in (adapter.down, adapter.up)], torch.float32)
    return list(zip(wanted, values[::2], values[1::2], strict=True)) if values else []


def _buckets(lm: nn.Module, itemsize: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Parameters (each once, however often it is tied, without adapters) and saved buffers, in buckets of at most
    `SHARD_BYTES`."""
    saved = lm.state_dict().keys()
    tensors = [*base_parameters(lm), *((n, b) for n, b in lm.named_buffers() if n in saved)]
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        # Under ZeRO-3 the parameter itself is empty; ds_numel is its full size.
        nbytes = getattr(tensor, "ds_numel", tensor.numel()) * itemsize
        if bucket and size + nbytes > SHARD_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    yield bucket


def pack_state(masters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """See `Backend.state`."""
    state: dict[str, Tensor] = {}
    for i, master in enumerate(masters):
        state[f"{i}.{MASTER}"] = _copy(master)
        for name, value in optimizer.state.get(master, {}).items():
            state[f"{i}.{name}"] = _copy(value)
    return state


def unpack_state(state: dict[str, Tensor], masters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """See `Backend.load_state`."""
    for i, master in enumerate(masters):
        mine = {name.partition(".")[2]: value for name, value in state.items() if name.partition(".")[0] == str(i)}
        weights = mine.pop(MASTER, None)
        if weights is None or weights.shape != master.shape:
            raise RunError(f"the checkpoint does not fit the model: partition {i} is not of {master.numel()} weights")
        with torch.no_grad():
            master.copy_(weights)
        # Fused AdamW counts its steps where the weights are.
        optimizer.state[master].update({name: value.to(master.device) for name, value in mine.items()})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
