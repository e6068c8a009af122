"""What the losses share: log-ratios within bounds, and sums over the tokens of each packed sequence.

Invariants:
- Sums over sequences carry no gradient and are float64: over tens of thousands of tokens float32 loses digits that exp
  would turn into a wrong ratio.
- Nothing waits for the device: buffers have R entries (there are no more sequences than tokens).
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside any clip range, and still finite in the gradient and in its square."""


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """logprobs - other within +-20; no gradient outside."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """The values, and 0 (with gradient 0) where the mask is False."""
    return torch.where(mask, values, torch.zeros_like(values))


@torch.no_grad()
def sequence_sum(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """(R,) float64: at each token, masked or not, the sum of the values at the unmasked tokens of its sequence."""
    ids = _dense(sequence)
    sums = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, ids, kept(values, mask).double())[ids]


def sequence_length(sequence: Tensor, mask: Tensor) -> Tensor:
    """(R,) float64: at each token, the number of unmasked tokens of its sequence."""
    return sequence_sum(torch.ones_like(mask, dtype=torch.float64), sequence, mask)


def sequence_mean(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """(R,) float64: at each token, the mean over the unmasked tokens of its sequence; 0 if it has none."""
    return sequence_sum(values, sequence, mask) / sequence_length(sequence, mask).clamp(min=1.0)


@torch.no_grad()
def last_tokens(sequence: Tensor, mask: Tensor) -> Tensor:
    """(R,) bool: the last unmasked token of each sequence that has any."""
    ids = _dense(sequence)
    rows = torch.arange(len(ids), device=ids.device)
    last = torch.full_like(rows, -1).scatter_reduce_(0, ids, rows.where(mask, -1), "amax")
    return rows == last[ids]


def _dense(sequence: Tensor) -> Tensor:
    """The same sequences counted from 0 without gaps."""
    ids = torch.zeros_like(sequence)
    ids[1:] = (sequence[1:] != sequence[:-1]).cumsum(0)
    return ids
