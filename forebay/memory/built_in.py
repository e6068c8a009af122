"""The sizes of the models that Forebay makes itself (`model.path: builtin:...`), as a `config.json` gives them.

Invariants:
- They are those of `forebay.training.tiny_model` and `random_models`, which need torch (a test compares them).
"""

from typing import Any

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.memory.architecture import Architecture, architecture_of, parse

BUILT_IN = "builtin:"
SPECIALS, BYTES, MARKS = 4, 256, 4
"""Tokens beside a tiny model's words; words of a random model; and its marks for images."""
TINY_POSITIONS = 512
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
RANDOM_POSITIONS = 2048
RANDOM_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Of every random model: `forebay.training.random_models` takes them from here."""
_RANDOM = RANDOM_SIZES | {"vocab_size": SPECIALS + BYTES, "tie_word_embeddings": True}
RANDOM: dict[str, dict[str, Any]] = {
    "builtin:random-qwen2": _RANDOM | {"model_type": "qwen2"},
    "builtin:random-qwen3": _RANDOM | {"model_type": "qwen3"},
    "builtin:random-qwen3_moe": _RANDOM
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
    "builtin:random-qwen2_5_vl": _RANDOM
    | {
        "model_type": "qwen2_5_vl",
        "vocab_size": SPECIALS + BYTES + MARKS,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}


def model_of(config: RunConfig) -> Architecture:
    """The profile's model. Raises `UserError`, also where a run would refuse a built-in model for these settings."""
    from forebay.data.tiny_tasks import TINY_TASKS

    path, most = config.model.path, config.model.max_model_len
    if path in TINY_TASKS:
        task = TINY_TASKS[path]
        task.check(config.data)
        sizes, positions = TINY | {"vocab_size": SPECIALS + len(task.words(config.data))}, TINY_POSITIONS
    elif path in RANDOM:
        sizes, positions = RANDOM[path], RANDOM_POSITIONS
    elif path.startswith(BUILT_IN):
        raise UserError(f"model.path {path}: the built-in models are {', '.join([*TINY_TASKS, *RANDOM])}")
    else:
        return architecture_of(path)
    if most > positions:
        raise UserError(
            f"model.max_model_len ({most}): model.path {path} has only {positions} positions; lower it, or name the "
            "model that is meant (model.path)"
        )
    return parse(sizes, path)
