"""The critic's loss, token by token."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(loss, clipped), each (R,); clipped: the token gives no gradient.

    loss = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), V_old the values that the returns were made
    of (PPO's reference implementation; Engstrom et al., arXiv 2005.12729, section 3, 1).
    """
    moved = values - old_values
    # Within the clip the value itself: old + moved would be off by a rounding, and flagged for it.
    bounded = torch.where(moved.abs() > clip, old_values + moved.clamp(-clip, clip), values)
    free, held = (values - returns).square(), (bounded - returns).square()
    return 0.5 * torch.maximum(free, held), (held > free).detach()
