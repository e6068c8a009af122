"""The checkpoint that a server was started with: what snapshots must look like, and what adapters are merged into.

Invariants:
- An adapter is merged only into the very files that its publisher trained it on; each file is hashed once.
- Merging works on copies, by `forebay.adapters.merged`, which is what the trainer would have done.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from forebay.adapters import DOWN, UP, WEIGHT, base_digests, merged


class SnapshotRefused(ValueError):
    """The snapshot is not what its publisher announced or does not fit the served model."""


class Base:
    """Of one server."""

    def __init__(self, folder: str) -> None:
        """Raises `SnapshotRefused` if there are no weights."""
        self._folder = Path(folder)
        self._digests: dict[str, str] | None = None
        self.shapes: dict[str, list[int]] = {}
        """Names and shapes of the checkpoint's tensors."""
        for path in self._files():
            with safe_open(path, framework="pt") as opened:
                self.shapes |= {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
        if not self.shapes:
            raise SnapshotRefused(f"the served model {folder} has no .safetensors file to compare snapshots with")

    def merge(
        self, pairs: dict[str, torch.Tensor], adapter: dict[str, Any], dtype: torch.dtype
    ) -> list[tuple[str, torch.Tensor]]:
        """All tensors in `dtype`, with the adapters in them. `adapter`: the manifest's entry of that name."""
        self._compare(adapter["base"])
        rest = dict(pairs)
        tensors = []
        for path in self._files():
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    weight, module = opened.get_tensor(name).to(dtype), name.removesuffix(WEIGHT)
                    down, up = rest.pop(module + DOWN, None), rest.pop(module + UP, None)
                    if down is not None or up is not None:
                        weight = _with_adapter(name, weight, down, up, adapter["scale"])
                    tensors.append((name, weight))
        if rest:
            raise SnapshotRefused(f"adapter tensor {sorted(rest)[0]} belongs to no weight of the served model")
        return tensors

    def _compare(self, wanted: dict[str, str]) -> None:
        if self._digests is None:
            self._digests = base_digests(self._folder)
        for name in sorted(wanted.keys() | self._digests.keys()):
            if wanted.get(name) != self._digests.get(name):
                raise SnapshotRefused(
                    f"an adapter of another model: {name} of the served model {self._folder} is not the file that it "
                    "was trained on"
                )

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.safetensors"))


def _with_adapter(
    name: str, weight: torch.Tensor, down: torch.Tensor | None, up: torch.Tensor | None, scale: float
) -> torch.Tensor:
    if down is None or up is None or (up.shape[0], down.shape[1], down.shape[0]) != (*weight.shape, up.shape[1]):
        shapes = [list(part.shape) if part is not None else None for part in (down, up)]
        raise SnapshotRefused(f"the adapter of {name}, of shape {list(weight.shape)}, has A and B of shapes {shapes}")
    weight = merged(weight, down, up, scale)
    if not bool(torch.isfinite(weight).all()):
        raise SnapshotRefused(f"tensor {name} has values that are not finite")
    return weight
