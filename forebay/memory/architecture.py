"""What memory depends on in a model: its sizes, and from them the number of parameters of each part.

Invariants:
- `Architecture.parameters` is exactly the number of the model that transformers builds from the same config.
- Nothing is guessed: a model of another family, or one whose config is not at hand, is refused.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import UserError
from forebay.memory.known_models import KNOWN, known

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl")
"""Values of `model_type` whose parts are known here."""


@dataclass(frozen=True)
class Vision:
    """The image encoder of Qwen2.5-VL; a token of the text is `merge` x `merge` patches."""

    layers: int
    hidden: int
    intermediate: int
    patch_values: int
    """Numbers in a patch: channels x frames x height x width."""
    merge: int
    out: int

    @property
    def layer_parameters(self) -> int:
        """Two norms, a fused query-key-value projection and an output projection, a gated feed-forward; all biased."""
        h, i = self.hidden, self.intermediate
        return 2 * h + 3 * h * h + 3 * h + h * h + h + 3 * h * i + 2 * i + h

    @property
    def parameters(self) -> int:
        """Patch embedding, layers, and the merger: a norm and two projections with biases."""
        merged = self.hidden * self.merge**2
        merger = self.hidden + merged * merged + merged + merged * self.out + self.out
        return self.patch_values * self.hidden + self.layers * self.layer_parameters + merger


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama kind: RMS norms, grouped-query attention, gated feed-forward, perhaps with experts."""

    layers: int
    hidden: int
    intermediate: int
    """Of the dense feed-forward."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """In each layer with experts; 0: a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    """Of a model with experts: layers without."""
    vision: Vision | None = None

    @property
    def query(self) -> int:
        """Numbers in one token's queries."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Numbers in one token's keys, and as many in its values, in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: projections, their biases, the norms of queries and keys."""
        both = self.query + 2 * self.key_value
        bias = self.qkv_bias * both + self.o_bias * self.hidden
        return self.hidden * both + self.query * self.hidden + bias + self.qk_norm * 2 * self.head_dim

    @property
    def dense_parameters(self) -> int:
        """Of one dense feed-forward."""
        return 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's experts, all of them, and its router."""
        return self.experts * (3 * self.hidden * self.expert_intermediate + self.hidden)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer."""
        feed_forward = self.expert_parameters if self.expert_layers else self.dense_parameters
        return self.attention_parameters + feed_forward + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and as many of an untied head."""
        return self.vocabulary * self.hidden

    @property
    def outside_layers(self) -> int:
        """Parameters outside of all decoder and image layers."""
        vision = self.vision.parameters - self.vision.layers * self.vision.layer_parameters if self.vision else 0
        return self.embedding * (1 if self.tied else 2) + self.hidden + vision

    @property
    def parameters(self) -> int:
        """All, a tied head once."""
        dense = self.layers - self.expert_layers
        decoder = self.layers * (self.attention_parameters + 2 * self.hidden)
        decoder += dense * self.dense_parameters + self.expert_layers * self.expert_parameters
        vision = self.vision.layers * self.vision.layer_parameters if self.vision else 0
        return decoder + vision + self.outside_layers

    @property
    def replicated(self) -> int:
        """Parameters that every tensor-parallel rank holds in full: norms and routers."""
        norms = self.layers * (2 * self.hidden + self.qk_norm * 2 * self.head_dim) + self.hidden
        return norms + self.expert_layers * self.experts * self.hidden

    def adapter_parameters(self, rank: int, targets: Collection[str] | None) -> int:
        """Of LoRA: rank x (inputs + outputs) of each chosen linear layer of the decoder (`training.lora.targets`)."""
        h, q, kv, i = self.hidden, self.query, self.key_value, self.intermediate
        attention = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        dense = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + i)
        widths = [(self.layers, attention), (self.layers - self.expert_layers, dense)]
        chosen = [layers * width for layers, each in widths for n, width in each.items() if not targets or n in targets]
        return rank * sum(chosen)

    def kv_token_bytes(self, itemsize: int, tensor_parallel: int = 1) -> int:
        """Keys and values of one token in all layers, on one tensor-parallel rank:
        2 x layers x key-value heads x head size x bytes. Heads are never split, but repeated if there are too few."""
        return 2 * self.layers * -(-self.kv_heads // tensor_parallel) * self.head_dim * itemsize


def architecture_of(path: str) -> Architecture:
    """Of `model.path`: a folder with a config.json, or a name in `known_models`. Raises `UserError`."""
    if (config := known(path)) is not None:
        return parse(config, path)
    file = Path(path).expanduser() / "config.json"
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")), path)
    except FileNotFoundError:
        names = ", ".join(sorted(KNOWN))
        raise UserError(
            f"model.path {path}: its sizes are not known here; give a folder with its config.json, or one of {names}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None


def parse(config: Any, name: str) -> Architecture:
    """From the content of a `config.json`; raises `UserError`, naming the model."""
    if not isinstance(config, Mapping):
        raise UserError(f"model.path {name}: its config.json is a {type(config).__name__}, not a mapping of names")
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UserError(
            f"model.path {name}: the parts of a {family} are not known here, only those of {', '.join(FAMILIES)}"
        )
    qwen2, qwen3 = family in ("qwen2", "qwen2_5_vl"), family in ("qwen3", "qwen3_moe")
    try:
        text = _mapping(config.get("text_config", config))
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        bias = bool(text.get("attention_bias", False))
        heads, layers = text["num_attention_heads"], text["num_hidden_layers"]
        # What transformers 5 saves has another name for it than the hub's files.
        count = "num_local_experts" if "num_local_experts" in text else "num_experts"
        experts = text[count] if family == "qwen3_moe" else 0
        every, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
        a = Architecture(
            layers=layers,
            hidden=text["hidden_size"],
            intermediate=text["intermediate_size"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            vocabulary=text["vocab_size"],
            tied=bool(tied),
            qkv_bias=qwen2 or bias,
            o_bias=bias and not qwen2,
            mlp_bias=family == "llama" and bool(text.get("mlp_bias", False)),
            qk_norm=qwen3,
            experts=experts,
            experts_per_token=text["num_experts_per_tok"] if experts else 0,
            expert_intermediate=text["moe_intermediate_size"] if experts else 0,
            dense_layers=sum(i in dense or (i + 1) % every != 0 for i in range(layers)) if experts else 0,
            vision=_vision(_mapping(config["vision_config"])) if family == "qwen2_5_vl" else None,
        )
        _check(a)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"model.path {name}: its config.json lacks what the estimate needs ({type(error).__name__}: {error})"
        ) from None
    return a


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a mapping")
    return value


def _check(a: Architecture) -> None:
    """Raises `TypeError` if a size is no number, or one that no model has."""
    sizes = vars(a) | ({f"vision {name}": size for name, size in vars(a.vision).items()} if a.vision else {})
    for name, size in sizes.items():
        least = 0 if isinstance(size, bool) or "expert" in name or name == "dense_layers" else 1
        if name != "vision" and (not isinstance(size, int) or size < least):
            raise TypeError(f"{name} is {size!r}")


def _vision(config: Mapping[str, Any]) -> Vision:
    channels = config.get("in_channels") or config.get("in_chans") or 3
    return Vision(
        layers=config["depth"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        patch_values=channels * config["temporal_patch_size"] * config["patch_size"] ** 2,
        merge=config["spatial_merge_size"],
        out=config["out_hidden_size"],
    )


def parse_size(text: str) -> int:
    """Bytes of `generation.kv_cache`: a number and K, M or G."""
    assert re.fullmatch(r"\d+[KMG]", text), "the profile's checks see to it"
    return int(text[:-1]) << 10 * ("KMG".index(text[-1]) + 1)
