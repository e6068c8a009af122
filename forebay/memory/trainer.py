"""Memory of one rank of the trainer at its fullest: the backward pass of a micro-batch of `micro_batch_tokens`.

P parameters, R ranks, b bytes of a number in `model.dtype`. What each backend
keeps (a test holds it against real ones):

| | weights | gradients | float32 weights and AdamW's moments |
| --- | --- | --- | --- |
| ZeRO-0, float32 | 4 P | 4 P | 8 P |
| ZeRO-1, float32 | 4 P | 4 P | 12 P / R |
| ZeRO-1, bfloat16 | 2 P | 2 P + 4 P in float32 | 12 P / R |
| ZeRO-2 | b P | 4 P / R | 12 P / R |
| ZeRO-3 | b P / R | 4 P / R | 12 P / R |
| FSDP2 | - | 4 P / R | 12 P / R |

Gradients, float32 weights and moments are of the trained parameters: of the adapters alone with LoRA, whose frozen
weights FSDP2 has at b P / R. With the optimizer offloaded, DeepSpeed has 8 P / R of gradients in CPU memory (and
b P / R of them below ZeRO-3).
(S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section 3, whose
gradients are 2 P: ours are summed over micro-batches in float32.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config import RunConfig
from forebay.memory.activations import FLOAT32, layer_bytes, vision_layer_bytes, working_bytes
from forebay.memory.architecture import Architecture, architecture_of
from forebay.memory.built_in import model_of
from forebay.memory.items import ITEMSIZE, FleetMemory, Item, present

RECOMPUTE_FROM = 64_000_000
"""Parameters from which `training.activation_checkpointing: auto` recomputes (`forebay.training.engine`)."""
LIVE, BUCKET = 1_000_000_000, 500_000_000
"""DeepSpeed's stage3_max_live_parameters and reduce_bucket_size, which Forebay leaves as they are: numbers."""
TILES = 3 * (128 << 20)
"""Bytes of the log-prob kernel's tiles on a GPU (`forebay.training.token_logprobs`): logits, scratch, weights."""


@dataclass(frozen=True)
class _Model:
    """One trained model, policy or critic, spread over the ranks."""

    parameters: float
    trainable: float
    layer: float
    """Parameters of the largest layer."""
    outside: float
    """Parameters outside of the layers."""
    name: str = ""


def trainer_memory(config: RunConfig, architecture: Architecture | None = None) -> FleetMemory:
    """The trainer's fleet. `architecture`: of the model, if it is at hand. Raises `UserError` for an unknown model."""
    a = architecture or model_of(config)
    models = [_policy(config, a), *_critic(config, a)]
    items = [
        *(item for model in models for item in _states(config, model)),
        *_reference(config, a),
        *_activations(config, a),
        *_host_copies(config, a, models),
    ]
    return FleetMemory("trainer", config.training.ranks, present(items))


def _policy(config: RunConfig, a: Architecture) -> _Model:
    lora = config.training.lora
    if lora is None:
        frozen = a.vision.parameters if a.vision and config.training.freeze_vision else 0
        return _Model(a.parameters, a.parameters - frozen, a.largest_layer, a.outside_layers)
    adapters = a.adapter_parameters(lora.rank, lora.targets)
    return _Model(a.parameters + adapters, adapters, a.largest_layer, a.outside_layers)


def _critic(config: RunConfig, a: Architecture) -> list[_Model]:
    """The trunk of a model and a number for each token. It is trained after the policy, batch by batch: its activations
    take the room of the policy's."""
    if config.algorithm.advantage != "gae":
        return []
    c = architecture_of(config.critic.model) if config.critic.model else a
    head = 0 if c.tied else c.embedding
    size = c.parameters - head + c.hidden + 1
    if (lora := config.training.lora) is None:
        return [_Model(size, size, c.largest_layer, c.outside_layers - head, "critic")]
    adapters = c.adapter_parameters(lora.rank, lora.targets)
    return [_Model(size + adapters, adapters + c.hidden + 1, c.largest_layer, c.outside_layers - head, "critic")]


def stage_of(config: RunConfig) -> int:
    """The ZeRO stage in effect; 4 is FSDP2, which shards all."""
    training = config.training
    if training.backend == "fsdp2":
        return 4
    return max(training.zero_stage, 1) if config.model.dtype == "bfloat16" else training.zero_stage


def _states(config: RunConfig, model: _Model) -> list[Item]:
    """Weights, gradients, optimizer, and what is gathered of the other ranks' parts."""
    stage, b, ranks = stage_of(config), ITEMSIZE[config.model.dtype], config.training.ranks
    offload, total, trained = config.training.offload, model.parameters, model.trainable
    here = min(ranks, config.hardware.devices_per_host)
    # FSDP2 computes with casts of the float32 weights, and keeps frozen ones in the model's type.
    kept, shards = total - trained if stage == 4 else total, ranks if stage >= 3 else 1
    weights = b * kept / shards
    gradients = FLOAT32 * trained / (ranks if stage >= 2 else 1)
    if stage == 1 and b < FLOAT32:
        gradients += b * trained
    optimizer = 8.0 * trained if stage == 0 else 12.0 * trained / ranks
    kind = f"ZeRO-{stage}" if stage < 4 else "FSDP2"
    name = f"{model.name} " if model.name else ""
    items = [
        _placed(f"{name}weights", weights, offload == "all", here, f"{kept / 1e9:.2f} G numbers x {b} B / {shards}"),
        _placed(
            f"{name}optimizer", optimizer, offload != "none", here, f"float32 weights and AdamW, {kind} over {ranks}"
        ),
        Item(f"{name}gathered", _gathered(config, model), 0.0, _gathered_how(stage)),
    ]
    how = f"float32, {kind} over {ranks}"
    if offload == "none" or stage == 4:
        return [items[0], _placed(f"{name}gradients", gradients, offload == "all", here, how), *items[1:]]
    # DeepSpeed sums them up in one buffer and hands them to the optimizer in another.
    own, passing = (b * trained if stage == 1 else 0.0), 8.0 * trained / ranks + b * trained / ranks * (stage < 3)
    return [items[0], Item(f"{name}gradients", own, here * passing, how), *items[1:]]


def _placed(name: str, nbytes: float, off: bool, here: int, how: str) -> Item:
    """On the device, or in the CPU memory of a host with `here` ranks."""
    return Item(name, 0.0 if off else nbytes, here * nbytes if off else 0.0, how)


def _gathered(config: RunConfig, model: _Model) -> float:
    stage, b = stage_of(config), ITEMSIZE[config.model.dtype]
    bucket = float(b * BUCKET)
    if stage < 2:
        return 0.0
    if stage == 2:
        return bucket
    if stage == 3:
        return b * min(LIVE, model.parameters) + bucket
    # FSDP2: a layer, the next one on its way, what is outside of the layers; a layer's gradients in both types.
    return b * (2 * model.layer + model.outside) + (b + FLOAT32) * max(model.layer, model.outside)


def _gathered_how(stage: int) -> str:
    return {
        2: "gradients on their way: DeepSpeed's reduce bucket",
        3: "live parameters and the reduce bucket of DeepSpeed",
        4: "two layers, all outside of layers, one layer's gradients",
    }.get(stage, "")


def _reference(config: RunConfig, a: Architecture) -> list[Item]:
    """Whole on every rank; between batches in CPU memory if it is offloaded, but on the device while it computes. With
    adapters it is the policy without them."""
    if config.algorithm.kl == "none" or config.training.lora is not None:
        return []
    nbytes = float(ITEMSIZE[config.model.dtype] * a.parameters)
    here = min(config.training.ranks, config.hardware.devices_per_host)
    off = config.algorithm.reference == "offload"
    return [Item("reference", nbytes, here * nbytes if off else 0.0, "the start model, whole on every rank")]


def _activations(config: RunConfig, a: Architecture) -> list[Item]:
    b, tokens = ITEMSIZE[config.model.dtype], config.training.micro_batch_tokens
    again = recomputes(config, a)
    one = tokens * (layer_bytes(a, b) + working_bytes(a, b))
    kept = tokens * a.layers * (b * a.hidden if again else layer_bytes(a, b))
    how = f"{tokens:,} tokens x {a.layers} layers"
    items = [Item("activations", kept + one, 0.0, f"{how}, {'recomputed, and one layer' if again else 'all kept'}")]
    if a.vision is not None:
        items.append(Item("image activations", *_vision(config, a, again)))
    head = tokens * (3 * b + FLOAT32) * a.hidden + b * a.embedding + TILES
    return [*items, Item("log-probs", float(head), 0.0, "final states, the head's gradient, tiles of logits")]


def _vision(config: RunConfig, a: Architecture, again: bool) -> tuple[float, float, str]:
    """Images fill the prompts at most: that share of the micro-batch's tokens."""
    assert a.vision is not None
    b, length = ITEMSIZE[config.model.dtype], config.model.max_model_len
    share = (length - config.generation.max_new_tokens) / length
    patches = config.training.micro_batch_tokens * share * a.vision.merge**2
    each = vision_layer_bytes(a.vision, b)
    kept = a.vision.layers * (b * a.vision.hidden if again else each)
    return patches * (kept + each), 0.0, f"{patches:,.0f} patches x {a.vision.layers} layers"


def recomputes(config: RunConfig, a: Architecture) -> bool:
    """Whether activations are recomputed in the backward pass."""
    chosen = config.training.activation_checkpointing
    return a.parameters >= RECOMPUTE_FROM if chosen == "auto" else chosen


def _host_copies(config: RunConfig, a: Architecture, models: Sequence[_Model]) -> list[Item]:
    """What rank 0's host, and each host, holds for the disk."""
    lora, ranks = config.training.lora, config.training.ranks
    snapshot = float(ITEMSIZE[config.model.dtype] * a.parameters)
    if lora is not None and lora.publish == "adapter":
        snapshot = float(FLOAT32 * models[0].trainable)
    here = min(ranks, config.hardware.devices_per_host) if stage_of(config) else ranks
    saved = 12.0 * sum(model.trainable for model in models) / ranks * here
    return [
        Item("snapshot", 0.0, snapshot, "the copy that is written while training goes on"),
        Item("checkpoint", 0.0, saved, "copies of float32 weights and moments, until written"),
    ]
