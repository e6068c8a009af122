"""From token losses to the loss of a batch: weights, and what their sum is divided by.

Invariants:
- loss = sum over all tokens of weight x token loss / sum over all responses of the divisor. Both sums are over the
  whole batch, so the split into ranks, micro-batches and chunks does not matter, nor does the order.
- A response's weights depend on itself alone, and the divisor needs lengths alone: gradients may be accumulated
  undivided before the batch is complete.
- Responses without trained tokens count nowhere.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from forebay.errors import RunError
from forebay.training.algorithms.tokens import kept, sequence_length

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed"]


def token_weights(kind: Aggregation, sequence: Tensor, mask: Tensor) -> Tensor:
    """(R,) float32: 1, for `sequence_mean` 1 / trained tokens of the sequence; 0 at masked tokens."""
    if kind == "sequence_mean":
        return sequence_length(sequence, mask).clamp(min=1.0).reciprocal().float().where(mask, 0.0)
    return mask.float()


def divisor(kind: Aggregation, lengths: Sequence[int], fixed_length: int | None = None) -> float:
    """What responses with so many trained tokens add to the divisor of the batch's loss.

    `token_mean`: their tokens; every token weighs the same (DAPO, arXiv 2503.14476, section 3.3).
    `sequence_mean`: 1 each; the mean over responses of their token means (GRPO, arXiv 2402.03300, equation 3).
    `sequence_sum`: 1 each; the mean over responses of their token sums.
    `fixed`: `fixed_length` each; a constant, so that length has no part in it (Dr. GRPO, arXiv 2503.20783).
    Raises `RunError` for `fixed` without `fixed_length`.
    """
    if kind == "token_mean":
        return float(sum(lengths))
    responses = float(sum(length > 0 for length in lengths))
    if kind != "fixed":
        return responses
    if fixed_length is None:
        raise RunError("algorithm.aggregation: `fixed` needs a length to divide by; set algorithm.fixed_length")
    return responses * fixed_length


def weighted_sum(loss: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights x loss, whatever the loss is where the weight is 0."""
    return torch.sum(weights * kept(loss, weights != 0))
