"""What trainer and engines agree on about LoRA adapters: names, the arithmetic of merging, digests of the base.

Invariants:
- Both sides merge with `merged`, so that an engine that gets an adapter serves what it would get as full weights.
- A pair is named after the linear layer's module in the base's files: `X.weight` has `X.lora_A.weight` (rank, in) and
  `X.lora_B.weight` (out, rank), both float32.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

WEIGHT, DOWN, UP = ".weight", ".lora_A.weight", ".lora_B.weight"
"""Endings of the names of a linear layer's weight, and of its adapter's A and B."""


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale x B A, in float32, rounded to the type of W (out, in). `down` is A, `up` is B."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)


def base_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of weights in a model's folder, by name."""
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
