"""Start models with random weights, one for each architecture that is supported: what a profile's tiny twin trains.

Invariants:
- A folder is a complete Hugging Face model (safetensors, config, tokenizer, chat template); the architecture and the
  seed determine it.
- Heads have 32 dimensions, experts and hidden states multiples of 32: vLLM's CPU kernels take nothing smaller.
- The tokenizer knows every text: its words are bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging as transformers_logging

from forebay.memory.built_in import RANDOM_POSITIONS, RANDOM_SIZES
from forebay.training import random_vl
from forebay.training.tiny_model import CHAT_TEMPLATE, END, PAD, SPECIALS

_SIZES: dict[str, Any] = RANDOM_SIZES | {
    "max_position_embeddings": RANDOM_POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": SPECIALS.index(END),
    "pad_token_id": SPECIALS.index(PAD),
    "dtype": "float32",
}
"""The range is that of weights that matter: predictions depend on the context, and an error anywhere shows."""


def _qwen2(vocabulary: int) -> PreTrainedConfig:
    # It has no key for the size of a head: it is hidden_size / num_attention_heads.
    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    return Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)


def _qwen3(vocabulary: int) -> PreTrainedConfig:
    return Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **_SIZES)


def _qwen3_moe(vocabulary: int) -> PreTrainedConfig:
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(vocab_size=vocabulary, tie_word_embeddings=False, **_SIZES, **experts)


def _qwen2_5_vl(vocabulary: int) -> PreTrainedConfig:
    return random_vl.config(vocabulary, {name: value for name, value in _SIZES.items() if name != "head_dim"})


ARCHITECTURES: dict[str, Callable[[int], PreTrainedConfig]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_5_vl": _qwen2_5_vl,
}
"""transformers' name of the model type -> its tiny configuration for a vocabulary of so many tokens."""


def save_random_model(architecture: str, seed: int, folder: Path) -> None:
    """Write the Hugging Face folder; `folder` exists. Raises `KeyError` for an architecture that is not known."""
    hf_logging: Any = transformers_logging
    hf_logging.disable_progress_bar()
    tokenizer, sees = byte_tokenizer(), architecture == "qwen2_5_vl"
    if sees:
        tokenizer.add_special_tokens(list(random_vl.MARKS))
    config = ARCHITECTURES[architecture](tokenizer.get_vocab_size())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
    if sees:
        random_vl.save_processor(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "padding_side": "left",
        "model_max_length": _SIZES["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": random_vl.CHAT_TEMPLATE if sees else CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """The special tokens of the built-in model, and one token for each byte of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: at for at, word in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer
