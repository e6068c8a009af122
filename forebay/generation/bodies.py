"""What requests to vLLM's `/inference/v1/generate` say.

Invariant: two responses share no random numbers, whatever their group, attempt or part.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

SEEDS_PER_REQUEST = 4096
"""vLLM gives child i of a request the seed + i; so far apart, two requests share no seed."""
STREAM_INTERVAL = 16
"""Tokens of a response in one chunk: what an engine's death loses of each response, and costs no throughput."""
REQUEST_FIELDS: Mapping[str, Any] = {"logprobs": 0, "detokenize": False, "stream_interval": STREAM_INTERVAL}


def body_of(token_ids: Sequence[int], features: Mapping[str, Any], sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """`features`: what the body has beyond a text prompt's; `sampling`: of vLLM's `SamplingParams`."""
    sampling_params = {**REQUEST_FIELDS, **sampling}
    return {"token_ids": list(token_ids), **features, "stream": True, "sampling_params": sampling_params}


def seed_of_continuation(seed: int, length: int) -> int:
    """With the seed of its first part a response would go on with the random numbers of its first part."""
    return int.from_bytes(hashlib.sha256(f"{seed} {length}".encode()).digest()[:7]) if length else seed
