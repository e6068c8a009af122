"""What Forebay knows of DeepSpeed's insides (ZeRO 0 to 3, float32 and bfloat16): everything beyond its public calls.

Invariants:
- Gradients are sums over tokens until `scaled_step`, which divides once, before norm and clipping.
- This rank's state is its partitions of the float32 weights and what AdamW keeps for each; weights in the model's own
  type follow from them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forebay.config import RunConfig
from forebay.errors import RunError
from forebay.training.backend import allocate

PERSISTENT_ELEMENTS = 100_000
"""ZeRO-3 leaves smaller parameters (norms, biases) whole on every rank: gathering them costs more than they weigh."""


def stage_of(config: RunConfig) -> int:
    """The ZeRO stage that is used. DeepSpeed has no float32 weights behind bfloat16 ones at stage 0, so small updates
    would be lost; stage 1 does the same with them."""
    stage = config.training.zero_stage
    return max(stage, 1) if config.model.dtype == "bfloat16" else stage


def deepspeed_config(config: RunConfig, *, cuda: bool) -> dict[str, Any]:
    """Unmanaged accumulation: each backward pass adds up, each `step()` is the boundary, so the number of
    micro-batches may differ from step to step."""
    bf16, stage, offload = config.model.dtype == "bfloat16", stage_of(config), config.training.offload
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Without ZeRO it clips but keeps the norm to itself; see `PlainStep`.
        "gradient_clipping": config.training.grad_clip if stage else 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        # Its own CPU optimizer is compiled for minutes; torch's fused AdamW is vectorised too.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
    }


class PlainStep:
    """Stage 0: divides, measures and clips the gradients when they have been reduced, just before the update."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        self.divisor, self.norm, self._clip = 1.0, 0.0, clip
        optimizer.register_step_pre_hook(self._before)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.divisor)
        self.norm = float(nn.utils.clip_grad_norm_(parameters, self._clip))


def partition(module: nn.Module, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """ZeRO-3: rank 0's weights, spread over the ranks one parameter at a time. All ranks together."""
    from deepspeed.runtime.zero import Init

    parameters = allocate(module.modules(), device, dtype)
    first: Any = next(parameters)
    holder = nn.Module()
    holder.first = first
    Init(module=holder, config_dict_or_path=config, dtype=dtype)
    first.convert_to_zero_parameters(parameters)


def mark_leaves(module: nn.Module) -> None:
    """ZeRO-3: gather each block with experts as one. Which of its parts a token reaches differs from rank to rank, and
    gradients enter by its router's side door too (`routers`)."""
    from deepspeed.utils import set_z3_leaf_modules

    blocks = {type(part) for part in module.modules() if isinstance(getattr(part, "experts", None), nn.Module)}
    if blocks:
        set_z3_leaf_modules(module, list(blocks))


def scaled_step(engine: Any, divisor: float) -> float:
    """One optimizer step from the accumulated gradients divided by `divisor`; returns their norm before clipping."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scaler"):
        # The loss scale divides gradients and norm; as it is one during every backward pass, it divides only.
        optimizer.loss_scale = float(divisor)
        try:
            engine.step()
        finally:
            optimizer.loss_scale = 1.0
    else:  # BF16_Optimizer (stage 1, bfloat16) has no loss scale, but its float32 accumulators are at hand
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
        engine.step()
    return float(engine.get_global_grad_norm())


def masters(optimizer: Any) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """(this rank's float32 weights, the AdamW that updates them)."""
    if isinstance(optimizer, torch.optim.Optimizer):  # stage 0, float32
        return [p for group in optimizer.param_groups for p in group["params"]], optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):  # stage 3; stages 1 and 2; stage 1 in bfloat16
            return list(getattr(optimizer, name)), optimizer.optimizer
    raise RunError(f"{type(optimizer).__name__} of this DeepSpeed keeps its weights where Forebay does not look")


def masters_to_model(optimizer: Any) -> None:
    """The model's weights from the float32 ones. All ranks together."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()
