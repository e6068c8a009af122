"""The next weights, made ready beside the served model: on CPU a swap then only exchanges pointers.

Invariants:
- Making a twin changes nothing of the served model; vLLM's own way to load a model at its start (fusing, packing) does
  the work, on the twin.
- A twin never computes anything; it shares with the model all that is not weights.
"""

import math
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

PACKED = "cpu_linear"
"""vLLM's CPU layers keep a closure over the packed weight here."""
MOE_KERNEL = "moe_kernel"
"""And the method of a layer of experts keeps what computes with the packed weights here."""


def load(model: Any, model_config: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """vLLM's reload of all of `model` from the tensors of a checkpoint; raises `ValueError` if one is left over."""
    reload: Any = layerwise
    expected = {name for name, _ in model.named_parameters()}
    remaining = iter(tensors)
    reload.initialize_layerwise_reload(model)
    loaded = model.load_weights(remaining)
    empty = [name for name in expected if _got_nothing(model.get_submodule(name.rpartition(".")[0]))]
    reload.finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu():
        _repack_tied_head(model)
    if next(remaining, None) is not None or (loaded is not None and expected - set(loaded)):
        raise ValueError(f"load_weights left out {sorted(expected - set(loaded or ()))[:3]}")
    if empty:
        raise ValueError(f"load_weights did not reach {sorted(empty)[:3]}")


def _got_nothing(module: Any) -> bool:
    info = layerwise.get_layerwise_info(module)
    return info.can_load() and not info.load_numel


def possible(model_config: Any) -> bool:
    """On an accelerator memory is short and captured graphs hold addresses; latent attention derives weights that are
    no parameters."""
    return current_platform.is_cpu() and not model_config.use_mla


@torch.no_grad()
def make_twin(model: Any, model_config: Any, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """A model of the same structure, loaded from `tensors` as a server loads its own at its start, ready to `exchange`.
    Raises `ValueError` if a tensor is left over or a (floating-point) weight is not reached."""
    twin = _clone(model, {})
    remaining = iter(tensors)
    twin.load_weights(remaining)
    left_out = [name for name, weight in twin.named_parameters() if bool(torch.isnan(weight).any())]
    if left_out or next(remaining, None) is not None:
        raise ValueError(f"load_weights left out {left_out[:3] or 'tensors'}")
    process_weights_after_loading(twin, model_config, torch.device("cpu"))
    for (name, module), other in zip(model.named_modules(), twin.modules(), strict=True):
        if module._parameters.keys() != other._parameters.keys():
            raise ValueError(f"module {name} has other weights after loading than it was served with")
    return twin


@torch.no_grad()
def exchange(model: Any, twin: Any) -> None:
    """Give the model its twin's weights."""
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameter.data = other._parameters[name].data
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffer.data = other._buffers[name].data
        if PACKED in vars(other):
            setattr(module, PACKED, getattr(other, PACKED))


def _clone(module: Any, known: dict[int, Any]) -> Any:
    """Modules and weights are new (shared ones stay shared), every other attribute is the original's. The weights are
    as before loading, and not a number."""
    if id(module) in known:
        return known[id(module)]
    twin = known[id(module)] = module.__class__.__new__(module.__class__)
    twin.__dict__ = vars(module).copy()
    if MOE_KERNEL in twin.__dict__:
        # vLLM 0.32 packs experts for the CPU only where they have no kernel yet.
        twin.__dict__[MOE_KERNEL] = None
    unloaded = module._parameters | layerwise.get_layerwise_info(module).restore_metadata[0]
    twin._parameters = {}
    for name, weight in unloaded.items():
        key = id(module._parameters.get(name, weight))
        if key not in known:
            known[key] = None if weight is None else _blank(weight, twin)
        twin._parameters[name] = known[key]
    twin._buffers = {name: _clone_tensor(value, known) for name, value in module._buffers.items()}
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    twin._modules = {name: child and _clone(child, known) for name, child in module._modules.items()}
    return twin


def _blank(weight: torch.Tensor, twin: Any) -> torch.Tensor:
    blank = restore_layer_refs(materialize_meta_tensor(weight), twin)
    return blank.fill_(math.nan if blank.is_floating_point() else 0)


def _clone_tensor(tensor: torch.Tensor | None, known: dict[int, Any]) -> Any:
    if tensor is None:
        return None
    if id(tensor) not in known:
        copy = tensor.data.clone()
        copy.__class__ = tensor.__class__
        copy.__dict__ = tensor.__dict__.copy()
        known[id(tensor)] = copy
    return known[id(tensor)]


def _repack_tied_head(model: Any) -> None:
    """vLLM 0.32 on CPU: a tied lm_head computes with a packed copy of the embedding; a reload leaves it stale."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, PACKED):
            module.quant_method.process_weights_after_loading(module)
