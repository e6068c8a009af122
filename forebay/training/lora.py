"""LoRA adapters (peft) in a policy.

Invariants:
- Only adapters have gradients, an optimizer and a place in checkpoints; the base never changes.
- A new adapter adds nothing (B is zero): the policy begins as the start model.
- An adapter is switched off by its scale, not by leaving it out: ZeRO-3 and FSDP2 see the same modules in the same
  order in every pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forebay.config import LoraConfig
from forebay.errors import UserError

NAME = "default"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class Adapter:
    """One linear layer's."""

    weight: str
    """The layer's weight by the name that it has without adapters."""
    down: Tensor
    up: Tensor
    scale: float


def add_adapters(lm: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Give the chosen layers adapters and freeze everything else; on the meta device where the model is there. The seed
    alone determines A. Raises `UserError` if a target is no linear layer of the decoder."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    settings: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [f"lm.{name}" for name in _targets(lm, config.targets)],
    }
    # Shown a model whose kind it knows, peft would take a dense layer's gate_proj for all experts' too.
    unknown = nn.ModuleDict({"lm": lm})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        on_meta = next(lm.parameters()).is_meta
        inject_adapter_in_model(PeftConfig(**settings), unknown, NAME, low_cpu_mem_usage=on_meta)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    if config.dropout:
        drops = [m for layer in _layers(lm) for m in layer.lora_dropout.modules() if isinstance(m, nn.Dropout)]

        def in_updates_only(*_: Any) -> None:
            for drop in drops:
                drop.train(torch.is_grad_enabled())

        decoder: Any = lm
        decoder.get_decoder().register_forward_pre_hook(in_updates_only)


def _targets(lm: Any, wanted: list[str] | None) -> list[str]:
    """Full names of the layers."""
    decoder = lm.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    linear = [name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    there = {name.rpartition(".")[2] for name in linear}
    for target in wanted or ():
        if target not in there:
            raise UserError(
                f"training.lora.targets: {type(lm).__name__} has no linear layer {target} in its decoder; it has "
                f"{', '.join(sorted(there))}"
            )
    return [name for name in linear if wanted is None or name.rpartition(".")[2] in wanted]


def adapters(lm: nn.Module) -> list[Adapter]:
    """All of them, in the model's order; tensors as the backend keeps them."""
    found = []
    for name, module in lm.named_modules():
        if _is_layer(module):
            parts: Any = module
            down, up = parts.lora_A[NAME].weight, parts.lora_B[NAME].weight
            found.append(Adapter(f"{name}.weight", down, up, parts.lora_alpha[NAME] / parts.r[NAME]))
    return found


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters without adapters, by the names that they have without them."""
    for name, parameter in lm.named_parameters():
        if not _is_adapter(name):
            yield name.replace(_BASE, "."), parameter


@contextmanager
def switched_off(lm: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does."""
    layers = _layers(lm)
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def _layers(lm: nn.Module) -> list[Any]:
    return [module for module in lm.modules() if _is_layer(module)]


def _is_layer(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
