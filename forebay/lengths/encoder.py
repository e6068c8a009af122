"""A causal LM without its head, as transformers loads it: hidden states of prompts, in batches of like length."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import UserError
from forebay.lengths.prompts import Indices, Prompts

if TYPE_CHECKING:
    import torch

BATCH_TOKENS = 16_384
"""Tokens of one forward pass, padding included."""
SMALL = 10_000_000
"""Parameters of a model that one thread serves best."""


def load_encoder(model: str, dtype: str, prompts: Prompts, setting: str) -> Any:
    """The model in evaluation mode, on the GPU if there is one. `setting` is named in errors. Raises `UserError` for
    what cannot be loaded or does not know all tokens of the prompts."""
    # transformers looks for DeepSpeed, which would look for an accelerator and talk about it.
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    hf_logging: Any = transformers_logging
    hf_logging.disable_progress_bar()
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    try:
        encoder = AutoModel.from_pretrained(place, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{setting} {model}: cannot be loaded ({type(error).__name__}: {reason})") from None
    largest, words = int(prompts.tokens.max(initial=0)), encoder.get_input_embeddings().num_embeddings
    if largest >= words:
        raise UserError(
            f"{setting} {model}: knows {words} tokens, and the prompts have token {largest}; name a model with the "
            "tokenizer of model.path"
        )
    return encoder.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@contextlib.contextmanager
def fitting_threads(encoder: Any) -> Iterator[None]:
    """One thread for a small model on the CPU: more are no faster on its matrices, and many times slower where their
    cores are busy."""
    import torch

    before = torch.get_num_threads()
    small = sum(p.numel() for p in encoder.parameters()) < SMALL
    if small and encoder.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(prompts: Prompts, rows: int) -> Iterator[Indices]:
    """All prompts, long ones first, in batches of at most `rows` and about `BATCH_TOKENS`."""
    order = np.argsort(-prompts.sizes, kind="stable")
    start = 0
    while start < len(order):
        fit = max(1, BATCH_TOKENS // max(1, int(prompts.sizes[order[start]])))
        yield order[start : start + min(rows, fit)]
        start += min(rows, fit)


def states(encoder: Any, prompts: Prompts, index: Indices) -> "tuple[torch.Tensor, torch.Tensor]":
    """Final hidden states [rows, longest, width], float32, and the mask [rows, longest] of what is no padding."""
    import torch

    sizes = prompts.sizes[index]
    ids = np.zeros((len(index), int(sizes.max())), dtype=np.int64)
    for row, i in enumerate(index):
        ids[row, : sizes[row]] = prompts.tokens[prompts.starts[i] : prompts.starts[i + 1]]
    mask = torch.from_numpy(np.arange(ids.shape[1])[None, :] < sizes[:, None]).to(encoder.device)
    # Padding is on the right, so that a causal model's states are those without it.
    found = encoder(input_ids=torch.from_numpy(ids).to(encoder.device), attention_mask=mask.long(), use_cache=False)
    return found.last_hidden_state.float(), mask


def last_states(found: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
    """[rows, width]: of each row's last token."""
    import torch

    return found[torch.arange(len(found), device=found.device), mask.sum(1) - 1]
