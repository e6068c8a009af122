"""Images in a request to vLLM: processed here, so that the engine sees the trainer's pixels and prompt.

Invariants:
- The engine is told where in the prompt's token ids each image stands; it neither scales an image nor changes an id.
- Tensors travel as msgpack within base64 (vLLM's `features`, for prompts that were rendered elsewhere); no pickle.
"""

import base64
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from forebay.control.types import RequestRefused
from forebay.data.images import Pictures, Pixels

RAW_VIEW = 3
"""vLLM's msgpack extension for the bytes of a tensor."""


class Encoder:
    """`features` of requests."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures

    def features(self, prompt_ids: Sequence[int], images: Sequence[str]) -> dict[str, Any]:
        """Raises `RequestRefused` if the prompt has not as many image tokens as its images."""
        vision = self._pictures.vision
        pixels = [self._pictures.pixels(name) for name in images]
        places = np.flatnonzero(np.asarray(prompt_ids) == vision.token)
        sizes = [len(one.values) // vision.merge**2 for one in pixels]
        if len(places) != sum(sizes):
            raise RequestRefused(f"the prompt has {len(places)} image tokens, its images have {sum(sizes)}")
        firsts = places[np.cumsum([0, *sizes[:-1]])]
        ranges = [{"offset": int(first), "length": size} for first, size in zip(firsts, sizes, strict=True)]
        return {
            "mm_hashes": {"image": list(images)},
            "mm_placeholders": {"image": ranges},
            "kwargs_data": {"image": [encode(one) for one in pixels]},
        }


def encode(pixels: Pixels) -> str:
    """vLLM's `MultiModalKwargsItem`, in two fields: the patches, to be laid end to end with those of other images, and
    the grid, to be stacked."""
    flat = ("flat", {"keep_on_cpu": False, "slices": [[0, len(pixels.values), None]], "dim": 0})
    item = {
        "pixel_values": {"data": _tensor(pixels.values), "field": flat},
        "image_grid_thw": {
            "data": _tensor(np.array(pixels.grid, np.int64)),
            "field": ("batched", {"keep_on_cpu": True}),
        },
    }
    return base64.b64encode(msgpack.packb(item)).decode()


def _tensor(array: NDArray[Any]) -> tuple[str, tuple[int, ...], msgpack.ExtType]:
    return array.dtype.name, array.shape, msgpack.ExtType(RAW_VIEW, np.ascontiguousarray(array).tobytes())
