"""What transformers says about a vision-language model: its own forward of one sequence, its own processor's pixels."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class ReferenceVl:
    """fp32, no KV cache, log-softmax in float64."""

    def __init__(self, folder: Path, images: Path) -> None:
        """`images`: where the kept images are."""
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._images = images

    def logits(self, ids: Sequence[int], images: Sequence[str]) -> torch.Tensor:
        """(len(ids), vocabulary)."""
        sequence = torch.tensor([list(ids)])
        inputs = {}
        if images:
            opened = [Image.open(self._images / f"{name}.png") for name in images]
            inputs = dict(self._processor(opened, return_tensors="pt"))
        kinds = (sequence == self.model.config.image_token_id).int()
        return self.model(sequence, **inputs, mm_token_type_ids=kinds, use_cache=False).logits[0]

    def logprobs(
        self, prompt: Sequence[int], images: Sequence[str], response: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """(len(response),) of the response tokens at this temperature, with gradients if they are on."""
        logits = self.logits([*prompt, *response], images)[len(prompt) - 1 : -1].double() / temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(list(response))[:, None])[:, 0]
