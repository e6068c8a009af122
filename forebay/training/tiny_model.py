"""The built-in model: a Qwen3 of 250,272 parameters, small enough to learn a task in a minute on one core.

Invariants:
- `TinyQwen3` computes what transformers' `Qwen3ForCausalLM` computes with the same weights (a test compares them).
- `save_model` writes a Hugging Face folder (safetensors, config, tokenizer, chat template) like any other model's.

The layers' weights are stacked along a first axis, so that an optimizer treats all layers in one go; transformers is
not imported, since that alone takes seconds.
"""

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 96, 3, 3, 1, 32, 192
"""vLLM's attention on the CPU has kernels for heads of 32, 64, 80, 96, ... and no smaller ones."""
MAX_POSITIONS, ROPE_THETA, NORM_EPS = 512, 10_000.0, 1e-6

PAD, END, USER, ASSISTANT = SPECIALS = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}
_NORMS = {
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
    "self_attn.q_norm": HEAD_DIM,
    "self_attn.k_norm": HEAD_DIM,
}


class TinyQwen3(nn.Module):
    """Causal LM with tied embeddings. Input (batch, time) token ids, padded on the right."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.02)

        self.embedding = normal(vocab_size, HIDDEN)
        self.matrices = nn.ParameterDict({_key(name): normal(LAYERS, *shape) for name, shape in _MATRICES.items()})
        norms = {_key(name): nn.Parameter(torch.ones(LAYERS, size)) for name, size in _NORMS.items()}
        self.norms = nn.ParameterDict(norms)
        self.final_norm = nn.Parameter(torch.ones(HIDDEN))
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(MAX_POSITIONS).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states, (batch, time, HIDDEN); times `embedding.T` they are the logits."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        weights = {name: stack.unbind(0) for name, stack in (*self.matrices.items(), *self.norms.items())}
        states = F.embedding(ids, self.embedding)
        for layer in range(LAYERS):
            w = {name: stack[layer] for name, stack in weights.items()}
            states = states + _attention(_norm(states, w["input_layernorm"]), w, cos, sin)
            states = states + _feed_forward(_norm(states, w["post_attention_layernorm"]), w)
        return _norm(states, self.final_norm)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, (batch, time, vocabulary)."""
        return self.hidden(ids) @ self.embedding.T

    def weights(self) -> dict[str, Tensor]:
        """The weights under transformers' names; the tied head is left out, as transformers does."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for name in (*_MATRICES, *_NORMS):
            stack = self.matrices[_key(name)] if name in _MATRICES else self.norms[_key(name)]
            for layer in range(LAYERS):
                named[f"model.layers.{layer}.{name}.weight"] = stack[layer]
        return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def make_tokenizer(words: list[str]) -> Tokenizer:
    """One token for each word; text is cut at the longest word that fits. Unknown text becomes `<pad>`."""
    vocabulary = {word: at for at, word in enumerate((*SPECIALS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save_model(model: TinyQwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder; `folder` exists."""
    save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _model_config(model.embedding.shape[0]))
    _write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())


def _attention(states: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    batch, time, _ = states.shape
    fused = F.linear(states, torch.cat([w["self_attn_q_proj"], w["self_attn_k_proj"], w["self_attn_v_proj"]]))
    queries, keys, values = torch.split(fused.view(batch, time, -1, HEAD_DIM), [HEADS, KV_HEADS, KV_HEADS], 2)
    queries = _rotate(_norm(queries, w["self_attn_q_norm"]).transpose(1, 2), cos, sin)
    keys = _rotate(_norm(keys, w["self_attn_k_norm"]).transpose(1, 2), cos, sin)
    mixed = F.scaled_dot_product_attention(queries, keys, values.transpose(1, 2), is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, time, -1), w["self_attn_o_proj"])


def _feed_forward(states: Tensor, w: dict[str, Tensor]) -> Tensor:
    gate, up = F.linear(states, torch.cat([w["mlp_gate_proj"], w["mlp_up_proj"]])).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w["mlp_down_proj"])


def _norm(states: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(states, (states.shape[-1],), weight, NORM_EPS)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; the two halves of a head are the two parts of its complex numbers."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _key(name: str) -> str:
    return name.replace(".", "_")  # a ParameterDict allows no dots


def _model_config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FEED_FORWARD,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rms_norm_eps": NORM_EPS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": True,
        "dtype": "float32",
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [USER, ASSISTANT],
        "padding_side": "left",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
