"""The learning rate as a pure function of how many updates have been made. Imports no torch.

Invariants:
- Nothing is kept: a run that goes on from a checkpoint needs the number of updates and no more.
- Each of the first `total` updates has a rate above zero.
"""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    update: int, *, peak: float, warmup: int, total: int, schedule: Schedule, min_ratio: float = 0.0
) -> float:
    """The rate of the update after `update` others (0 for the first one).

    Warm-up, update < warmup: peak (update + 1) / warmup. After it, with p = (update - warmup) / (total - warmup), at
    most 1: peak (m + (1 - m) s(p)), m = min_ratio, where s is 1 (`constant`), 1 - p (`linear`) or (1 + cos(pi p)) / 2
    (`cosine`; SGDR, arXiv 1608.03983, equation 5, one period). The minimum is where update number `total` would be, so
    an empty batch, which is no update, only leaves the rate a little higher at the end.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    share = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (min_ratio + (1.0 - min_ratio) * share)
