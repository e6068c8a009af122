"""What a micro-batch holds of images, and where its tokens stand.

Invariants:
- Placeholders are those of the prompt. An image token that the policy samples is a token like any other, here and in
  the engine.
- Every micro-batch of a model with a vision tower has an image, if need be a blank one of weight 0: under ZeRO-2, 3 and
  FSDP2 a rank that did not use the tower would leave the others waiting, or its gradients in the wrong bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.data.images import Pixels, Vision
from forebay.errors import RunError

BLANK = ""
"""Name of the blank image; one token."""

Grid = tuple[int, int, int]


class Pictures(Protocol):
    """Where images come from (`forebay.data.images.Pictures`)."""

    vision: Vision

    def pixels(self, name: str) -> Pixels:
        """By name."""


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The I different images of T packed tokens, N patches in all, P placeholders."""

    values: Tensor
    """(N, width) float32."""
    grids: Tensor
    """(I, 3) int64: (1, rows, columns) of patches."""
    places: Tensor
    """(P,) int64: index in T."""
    features: Tensor
    """(P,) int64: which of the tower's outputs stands there."""

    def to(self, device: torch.device) -> "ImageBatch":
        return ImageBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


def blank(vision: Vision) -> Pixels:
    """The smallest image there can be."""
    grid = (1, vision.merge, vision.merge)
    return Pixels(np.zeros((vision.merge**2, vision.width), np.float32), grid)


def rope_positions(prompt: NDArray[np.int64], length: int, grids: Sequence[Grid], vision: Vision) -> NDArray[np.int64]:
    """(3, length): temporal, row and column position of each token of one sequence that begins with this prompt.

    Text counts up in all three. An image of h x w tokens at position p has (p, p + row, p + column); what follows it
    goes on at p + max(h, w) (Qwen2-VL, arXiv:2409.12191, section 2.1)."""
    parts, done, at, seen = [], 0, 0, 0
    places = np.flatnonzero(prompt == vision.token)
    for _, rows, columns in grids:
        h, w = rows // vision.merge, columns // vision.merge
        text = int(places[seen]) - done
        parts += [_text(text, at), np.indices((1, h, w)).reshape(3, -1) + at + text]
        at, done, seen = at + text + max(h, w), done + text + h * w, seen + h * w
    return np.concatenate([*parts, _text(length - done, at)], axis=1)


def _text(length: int, start: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + length), (3, length))


def lay_out(sequences: Sequence[Any], starts: NDArray[np.int64], pictures: Pictures) -> tuple[Tensor, ImageBatch]:
    """(position_ids (3, 1, T), the images) of `TrainSequence`s that lie at `starts`. Raises `RunError` if a prompt has
    not as many placeholders as its images have tokens."""
    vision = pictures.vision
    names = list(dict.fromkeys(name for s in sequences for name in s.images))
    pixels = {name: pictures.pixels(name) if name else blank(vision) for name in names}
    counts = {name: len(p.values) // vision.merge**2 for name, p in pixels.items()}
    first = dict(zip(names, np.cumsum([0, *counts.values()]), strict=False))
    positions, places, features = [], [], []
    for sequence, start in zip(sequences, starts, strict=False):
        prompt = np.asarray(sequence.prompt_ids, dtype=np.int64)
        own = np.flatnonzero(prompt == vision.token)
        if len(own) != sum(counts[name] for name in sequence.images):
            raise RunError(
                f"a prompt has {len(own)} image tokens, but its images have "
                f"{sum(counts[name] for name in sequence.images)}: the data was prepared for another model"
            )
        positions.append(rope_positions(prompt, len(sequence), [pixels[n].grid for n in sequence.images], vision))
        places.append(own + start)
        features += [first[name] + np.arange(counts[name]) for name in sequence.images]
    batch = ImageBatch(
        values=torch.from_numpy(np.concatenate([p.values for p in pixels.values()])),
        grids=torch.tensor([p.grid for p in pixels.values()], dtype=torch.int64),
        places=torch.from_numpy(np.concatenate(places)),
        features=torch.from_numpy(np.concatenate(features)),
    )
    return torch.from_numpy(np.concatenate(positions, axis=1))[:, None], batch
