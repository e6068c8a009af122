"""Images of prompts: made ready once, so that engine and trainer see the same pixels.

Invariants:
- `prepare_data` decodes an image, turns it to RGB and scales it; what is kept is a lossless PNG of a size that the
  model's own processor leaves as it is. Whoever needs its pixels computes them from that.
- The name of a kept image is the SHA-256 of its size and colours: equal images are there once, and a damaged one is
  noticed. Not of its file, which depends on who compressed it, and with it prompts' ids and their splits.
- An image of h x w pixels is (h / cell) x (w / cell) tokens of the prompt, `cell` = patch x merge.

Only numpy and Pillow: the Control Unit's process needs pixels too, and has neither torch nor transformers.
"""

import base64
import binascii
import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forebay.config import ImagesConfig
from forebay.errors import DataError, RunError, UserError

MARK = "<image>"
"""Where an image stands in the text of a prompt."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""`model_type` of the models whose images are understood here."""
MOST_SOURCE_PIXELS = 1 << 26
"""Of an image before it is scaled; a compressed file of a few kB can hold more than memory does."""
STEEPEST = 200
"""Largest ratio of the sides, as in Qwen's processor."""
_DEFAULTS = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class Vision:
    """How a model takes images."""

    patch: int
    """Side of a patch in pixels."""
    frames: int
    """Frames in a patch; a still image is repeated."""
    merge: int
    """Side of what becomes one token, in patches."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the colours, in [0, 1]."""
    least: int
    most: int
    """Pixels of an image."""
    token: int
    """The token that an image is made of, repeated."""

    @property
    def cell(self) -> int:
        """Side of what becomes one token, in pixels."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """Numbers in a patch."""
        return 3 * self.frames * self.patch**2


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image as the vision tower takes it."""

    values: NDArray[np.float32]
    """(patches, 3 x frames x patch^2), the patches of a token together, row by row."""
    grid: tuple[int, int, int]
    """(1, rows, columns) of patches."""


def vision_of(model: Path) -> Vision | None:
    """Of a Hugging Face folder; None if the model reads no images. Raises `UserError` if it reads them in a way that
    is unknown here."""
    # A folder without a config is refused where models are checked.
    config = _json(model / "config.json") if (model / "config.json").exists() else {}
    if "vision_config" not in config:
        return None
    if config.get("model_type") not in FAMILIES:
        raise UserError(
            f"model.path: images of a {config.get('model_type')} are not supported, only those of {', '.join(FAMILIES)}"
        )
    own = _processor(model)
    size = own.get("size") or {}
    return Vision(
        patch=own.get("patch_size", _DEFAULTS["patch_size"]),
        frames=own.get("temporal_patch_size", _DEFAULTS["temporal_patch_size"]),
        merge=own.get("merge_size", _DEFAULTS["merge_size"]),
        mean=tuple(own.get("image_mean", _CLIP_MEAN)),
        std=tuple(own.get("image_std", _CLIP_STD)),
        least=own.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        most=own.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        token=config["image_token_id"],
    )


def bounds(vision: Vision, config: ImagesConfig) -> tuple[int, int]:
    """(fewest, most) pixels of a kept image: the profile's, or else the model's."""
    most = config.max_pixels or vision.most
    return min(vision.least, most), most


def fitting(height: int, width: int, cell: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) of the scaled image: multiples of `cell`, the proportions about kept, the area within bounds
    (`smart_resize` of Qwen2-VL). Raises `DataError` for a sliver."""
    if max(height, width) > STEEPEST * min(height, width):
        raise DataError(f"an image of {width} x {height} pixels is more than {STEEPEST} times as long as wide")
    tall, wide = round(height / cell) * cell, round(width / cell) * cell
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        tall = max(cell, math.floor(height / shrink / cell) * cell)
        wide = max(cell, math.floor(width / shrink / cell) * cell)
    elif tall * wide < least:
        grow = math.sqrt(least / (height * width))
        tall, wide = math.ceil(height * grow / cell) * cell, math.ceil(width * grow / cell) * cell
    return tall, wide


def pixels_of(image: Image.Image, vision: Vision) -> Pixels:
    """Of a kept image: colours brought to mean 0 and deviation 1, cut into patches."""
    colours = np.asarray(image, dtype=np.float32)
    p, m, t = vision.patch, vision.merge, vision.frames
    rows, columns = colours.shape[0] // p, colours.shape[1] // p
    # In the order of operations of transformers, so that the values agree to the last bit but one.
    mean, deviation = np.array(vision.mean, np.float32), np.array(vision.std, np.float32)
    colours = (colours * np.float32(1 / 255) - mean) / deviation
    cut = colours.reshape(rows // m, m, p, columns // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    cut = np.repeat(cut[:, :, :, :, :, None], t, axis=5)
    return Pixels(np.ascontiguousarray(cut.reshape(rows * columns, vision.width)), (1, rows, columns))


class Pictures:
    """The kept images of a run, under `folder`."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        self.folder, self.vision = folder, vision

    @classmethod
    def of(cls, folder: Path, model: Path) -> "Pictures | None":
        """None if the model reads no images."""
        vision = vision_of(model)
        return None if vision is None else cls(folder, vision)

    def keep(self, source: "bytes | Image.Image", config: ImagesConfig) -> str:
        """Make an image ready and keep it; returns its name. Raises `DataError` if it is broken or too large."""
        image = self._ready(source, config)
        name = _name(image)
        place = self.folder / f"{name}.png"
        if not place.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Several processes may keep the same image.
            unfinished = place.with_suffix(f".{os.getpid()}.unfinished")
            image.save(unfinished, "PNG")
            unfinished.replace(place)
        return name

    def pixels(self, name: str) -> Pixels:
        """Raises `RunError` if the image is missing or damaged."""
        place = self.folder / f"{name}.png"
        try:
            with Image.open(place) as image:
                image.load()
        except (OSError, ValueError, SyntaxError) as error:
            reason = str(error).splitlines()[0]
            raise RunError(f"{place}: an image of the data cannot be read ({reason})") from None
        if _name(image) != name:
            raise RunError(f"{place}: the image is not the one that prepare_data kept")
        return pixels_of(image, self.vision)

    def tokens(self, name: str) -> int:
        """Tokens of the prompt that a kept image takes."""
        with Image.open(self.folder / f"{name}.png") as image:
            return image.width * image.height // self.vision.cell**2

    def _ready(self, source: "bytes | Image.Image", config: ImagesConfig) -> Image.Image:
        if isinstance(source, bytes) and len(source) > config.max_mb * 1e6:
            raise DataError(f"an image has {len(source) / 1e6:.1f} MB; data.images.max_mb is {config.max_mb:g}")
        try:
            image = Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source
            if image.width * image.height > MOST_SOURCE_PIXELS:
                raise DataError(f"an image has {image.width} x {image.height} pixels; most are {MOST_SOURCE_PIXELS:,}")
            image = image.convert("RGB")
        # Pillow raises its own subclass of OSError, and these for damaged chunks.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"an image cannot be read ({str(error).splitlines()[0][:100]})") from None
        tall, wide = fitting(image.height, image.width, self.vision.cell, *bounds(self.vision, config))
        return image.resize((wide, tall), Image.Resampling.BICUBIC)


def image_source(item: Any, folder: Path | None) -> "bytes | Image.Image":
    """What a row holds for an image: bytes, {bytes, path} (Hugging Face's), a path below `folder` (None: no paths
    there), a base64 data URL, or a decoded image. Raises `DataError`."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes | Image.Image):
        return item
    if not isinstance(item, str) or not item:
        raise DataError(f"an image is of type {type(item).__name__}, not bytes, a path or a data URL")
    if item.startswith("data:"):
        try:
            return base64.b64decode(item.partition(";base64,")[2], validate=True)
        except binascii.Error:
            raise DataError("an image's data URL is not base64") from None
    if folder is None:
        raise DataError(f"an image is a path ({item}), but the data has no folder; set data.images.folder")
    place = (folder / item).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise DataError(f"the image {item} is not below {folder}; set data.images.folder")
    try:
        return place.read_bytes()
    except OSError as error:
        raise DataError(f"the image {place} cannot be read ({error.strerror})") from None


def _name(image: Image.Image) -> str:
    return hashlib.sha256(f"{image.width} x {image.height} ".encode() + image.tobytes()).hexdigest()


def _processor(model: Path) -> Mapping[str, Any]:
    """The image settings of a model, wherever its version of transformers has put them."""
    if (model / "preprocessor_config.json").exists():
        return _json(model / "preprocessor_config.json")
    if (model / "processor_config.json").exists():
        return dict(_json(model / "processor_config.json").get("image_processor", {}))
    raise UserError(f"model.path: {model} reads images but has no preprocessor_config.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {path} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"model.path: {path} is not an object")
    return content
