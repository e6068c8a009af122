"""What transformers says about a model: the independent reference for engine log-probabilities and greedy decoding."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class ReferenceModel:
    """fp32, no KV cache, log-softmax in float64."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def distributions(self, ids: Sequence[int]) -> torch.Tensor:
        """(len(ids), vocabulary): row t is the log-distribution of what follows ids[: t + 1]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each response token at this temperature."""
        rows = torch.log_softmax(self.distributions([*prompt, *response]) / temperature, -1)
        return [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]

    def is_greedy(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Whether every response token is the most likely one after what precedes it."""
        rows = self.distributions([*prompt, *response])[len(prompt) - 1 : -1]
        return rows.argmax(-1).tolist() == list(response)
