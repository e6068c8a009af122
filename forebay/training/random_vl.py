"""The tiny random Qwen2.5-VL: a vision tower of two layers before the tiny language model, its processor's settings,
and a chat template that takes images.

Invariants:
- As in `random_models`; heads of 32 dimensions in the tower too. One of its layers looks at windows of 2 x 2 tokens,
  the other at the whole image, as the real one's do.
"""

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLConfig

MARKS = VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
MOST_PIXELS = 28 * 28 * 64
"""Of an image: 64 tokens."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '" + VISION_START + IMAGE + VISION_END + "' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.15,
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": MOST_PIXELS,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def config(vocabulary: int, sizes: dict[str, Any]) -> Qwen2_5_VLConfig:
    """`MARKS` are the last tokens of the vocabulary; `sizes` are those of the language model."""
    first = vocabulary - len(MARKS)
    marks = {mark: first + place for place, mark in enumerate(MARKS)}
    # 4 + 6 + 6: half the dimensions of a head, shared out to time, rows and columns.
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    text = {name: value for name, value in sizes.items() if name != "dtype"}
    return Qwen2_5_VLConfig(
        text_config={**text, "vocab_size": vocabulary, "rope_parameters": rope},
        vision_config={**_TOWER, "out_hidden_size": sizes["hidden_size"]},
        vision_start_token_id=marks[VISION_START],
        vision_end_token_id=marks[VISION_END],
        image_token_id=marks[IMAGE],
        video_token_id=marks[VIDEO],
        tie_word_embeddings=False,
        dtype=sizes["dtype"],
    )


def save_processor(folder: Path) -> None:
    """What the folder needs beside model and tokenizer."""
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n", encoding="utf-8")
