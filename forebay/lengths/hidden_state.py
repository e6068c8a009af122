"""`hidden_state`: ridge regression on the start model's final hidden states: the prompt's last one, and their mean."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.lengths.encoder import batches, fitting_threads, last_states, load_encoder, states
from forebay.lengths.prompts import Prompts, Vector
from forebay.lengths.ridge import Ridge, fit_ridge

ROWS = 256
"""Prompts in one forward pass, at most."""


@dataclass(frozen=True)
class HiddenState:
    """Fitted by `fit_hidden_state`; a `Location`."""

    encoder: Any
    ridge: Ridge

    def predict(self, prompts: Prompts) -> Vector:
        """Mean log length of each prompt's responses."""
        result = np.empty(len(prompts))
        for index, features in _features(self.encoder, prompts):
            result[index] = self.ridge.predict(features)
        return result


def fit_hidden_state(prompts: Prompts, target: Vector, model: str, dtype: str) -> HiddenState:
    """`target`: mean log length of each prompt's responses; `model`: folder of the start model."""
    encoder = load_encoder(model, dtype, prompts, "model.path")
    rows: list[Vector] = [np.zeros(0)] * len(prompts)
    for index, features in _features(encoder, prompts):
        for row, i in enumerate(index):
            rows[i] = features[row]
    return HiddenState(encoder, fit_ridge(np.stack(rows), target))


def _features(encoder: Any, prompts: Prompts) -> Any:
    """(indices, [rows, 2 width]) of each batch."""
    import torch

    with fitting_threads(encoder), torch.inference_mode():
        for index in batches(prompts, ROWS):
            found, mask = states(encoder, prompts, index)
            mean = (found * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            yield index, torch.cat([last_states(found, mask), mean], dim=1).double().cpu().numpy()
