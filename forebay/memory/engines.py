"""Memory of one device of a generation engine: a vLLM server of so many tensor- and pipeline-parallel ranks.

The cache's size is given (`generation.kv_cache`, on each device); what is computed is how many tokens it holds, by
vLLM's formula: blocks of 16 tokens, each 2 x layers x key-value heads x head size x bytes a token.
"""

from itertools import pairwise

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.memory.architecture import Architecture, parse_size
from forebay.memory.built_in import model_of
from forebay.memory.items import ITEMSIZE, FleetMemory, Item, present

BLOCK = 16
"""Tokens in a block of vLLM's cache."""
PREFILL_TOKENS = 8192
"""vLLM's max_num_batched_tokens on a server GPU."""
SAMPLING_COPIES = 3
"""Float32 logits of all sequences: raw, processed, and their sorted or softmax copy."""


def parallel_sizes(config: RunConfig) -> tuple[int, int]:
    """(tensor, pipeline) parallel ranks of one engine, from vLLM's arguments in `generation.extra_args`. Raises
    `UserError` if one of them has no number."""
    sizes = {"tensor": 1, "pipeline": 1}
    names = {"tensor": ("--tensor-parallel-size", "-tp"), "pipeline": ("--pipeline-parallel-size", "-pp")}
    words = [word for arg in config.generation.extra_args for word in arg.replace("=", " ").split()]
    for kind, own in names.items():
        for word, value in pairwise([*words, "nothing"]):
            flag = word.replace("_", "-") if word.startswith("--") else word  # vLLM takes both
            if flag not in own:
                continue
            if not value.isdecimal() or int(value) == 0:
                raise UserError(
                    f"generation.extra_args: {word} is followed by {value}; give the number of ranks, 1 or more"
                )
            sizes[kind] = int(value)
    return sizes["tensor"], sizes["pipeline"]


def engine_devices(config: RunConfig) -> int:
    """Devices of one engine."""
    tensor, pipeline = parallel_sizes(config)
    return tensor * pipeline


def engine_weights(a: Architecture, itemsize: int, tensor: int, pipeline: int) -> float:
    """Bytes of the weights on one device: matrices are cut into equal parts, norms and routers repeated, as are
    key-value heads where there are fewer than ranks. With stages, of a stage with both embedding and layers."""
    repeated_heads = max(tensor - a.kv_heads, 0) / tensor * 2 * a.hidden * a.key_value * a.layers / a.kv_heads
    layers = a.parameters - a.outside_layers
    own = a.outside_layers + layers / pipeline
    return itemsize * ((own - a.replicated / pipeline) / tensor + a.replicated / pipeline + repeated_heads / pipeline)


def kv_tokens(config: RunConfig, a: Architecture) -> int:
    """Tokens that the cache of one engine holds, in whole blocks."""
    tensor, pipeline = parallel_sizes(config)
    block = BLOCK * a.kv_token_bytes(ITEMSIZE[config.model.dtype], tensor) / pipeline
    return int(parse_size(config.generation.kv_cache) // block) * BLOCK


def engines_memory(config: RunConfig, architecture: Architecture | None = None) -> FleetMemory:
    """The fleet of engines. Raises `UserError` for an unknown model."""
    a = architecture or model_of(config)
    b, generation = ITEMSIZE[config.model.dtype], config.generation
    tensor, pipeline = parallel_sizes(config)
    devices = generation.engines * tensor * pipeline
    here = min(devices, config.hardware.devices_per_host)
    width = 4 * a.hidden + 4 * max(a.intermediate, a.experts_per_token * a.expert_intermediate) / tensor
    prefill = b * max(PREFILL_TOKENS, config.model.max_model_len if a.vision else 0) * width
    sampling = SAMPLING_COPIES * 4.0 * generation.max_num_seqs * a.vocabulary
    items = [
        Item(
            "weights",
            engine_weights(a, b, tensor, pipeline),
            0.0,
            f"{a.parameters / 1e9:.2f} G numbers x {b} B / {tensor * pipeline}, norms repeated",
        ),
        Item("KV cache", float(parse_size(generation.kv_cache)), 0.0, kv_text(config, a)),
        Item("prefill", prefill, 0.0, f"{PREFILL_TOKENS:,} tokens through one layer"),
        Item("sampling", sampling, 0.0, f"float32 logits of {generation.max_num_seqs} sequences"),
        Item("staged snapshot", 0.0, float(here * b * a.parameters), f"read by each of {here} workers of a host"),
    ]
    return FleetMemory("engines", devices, present(items))


def kv_text(config: RunConfig, a: Architecture) -> str:
    """How far the cache goes."""
    tokens, most = kv_tokens(config, a), config.model.max_model_len
    return f"{tokens:,} tokens: {tokens / most:,.1f} sequences of {most:,}"
