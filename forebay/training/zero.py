"""What Forebay knows of DeepSpeed's insides (ZeRO 1 to 3, float32 and bfloat16): everything beyond its public calls.

Invariants:
- Gradients are sums over tokens until `scaled_step`, which divides once, before norm and clipping.
- This rank's state is its partitions of the float32 weights and what AdamW keeps for each; weights in the model's own
  type follow from them.
"""

from typing import Any

import torch
from torch import Tensor

from forebay.config import RunConfig
from forebay.errors import RunError

MASTER = "master"


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Unmanaged accumulation: each backward pass adds up, each `step()` is the boundary, so the number of
    micro-batches may differ from step to step."""
    bf16 = config.model.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.training.grad_clip,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": config.training.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": bf16},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
    }


def scaled_step(engine: Any, divisor: int) -> float:
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


def optimizer_state(engine: Any) -> dict[str, Tensor]:
    """Copies on the CPU: `<partition>.master`, and AdamW's `.step`, `.exp_avg`, `.exp_avg_sq` once there was a step."""
    state: dict[str, Tensor] = {}
    for i, master in enumerate(_masters(engine.optimizer)):
        state[f"{i}.{MASTER}"] = _copy(master)
        for name, value in engine.optimizer.optimizer.state.get(master, {}).items():
            state[f"{i}.{name}"] = _copy(value)
    return state


def load_optimizer_state(engine: Any, state: dict[str, Tensor]) -> None:
    """Put it back, and the model's weights with it. All ranks together. Raises `RunError` if it does not fit."""
    optimizer = engine.optimizer
    for i, master in enumerate(_masters(optimizer)):
        mine = {name.partition(".")[2]: value for name, value in state.items() if name.partition(".")[0] == str(i)}
        weights = mine.pop(MASTER, None)
        if weights is None or weights.shape != master.shape:
            raise RunError(f"the checkpoint does not fit the model: partition {i} is not of {master.numel()} weights")
        with torch.no_grad():
            master.copy_(weights)
        for name, value in mine.items():
            # AdamW counts its steps on the CPU.
            optimizer.optimizer.state[master][name] = value if name == "step" else value.to(master.device)
    _masters_to_model(optimizer)


def _masters(optimizer: Any) -> list[Tensor]:
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):  # stage 3; stages 1 and 2; stage 1 in bfloat16
            partitions: list[Tensor] = getattr(optimizer, name)
            return partitions
    raise RunError(f"{type(optimizer).__name__} of this DeepSpeed keeps its weights where Forebay does not look")


def _masters_to_model(optimizer: Any) -> None:
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
