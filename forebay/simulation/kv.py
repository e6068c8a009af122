"""How many tokens an engine's KV cache holds: its bytes over the bytes of one token."""

import json
import math
from pathlib import Path

from forebay.memory.known_models import known

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
ELEMENT = {"float32": 4, "bfloat16": 2}


def token_bytes(model: Path, dtype: str) -> float | None:
    """Keys and values of one token in all layers, of a model folder in Hugging Face format or a known model; None if it
    does not say."""
    try:
        config = known(str(model)) or json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] / heads
        return float(
            2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width * ELEMENT[dtype]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def capacity(kv_cache: str, bytes_per_token: float | None) -> float:
    """Tokens in a cache of this size (`generation.kv_cache`); infinite if the size of one is not known."""
    if not bytes_per_token:
        return math.inf
    return int(kv_cache[:-1]) * UNITS[kv_cache[-1]] // bytes_per_token
