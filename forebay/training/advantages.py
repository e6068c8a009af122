"""Group-relative advantages.

Invariants:
- The advantages of a group sum to zero, so a group without reward spread teaches nothing.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-6
"""Added to the standard deviation; keeps a tiny spread finite without changing an ordinary one."""


def group_advantages(rewards: Sequence[float], kind: Literal["std", "mean"]) -> NDArray[np.float64]:
    """One advantage for each response of one group; shape (n,).

    `std`: (r - mean) / (std + 1e-6), outcome supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    The paper does not say which deviation; this is the unbiased one (divisor n - 1), as in verl and TRL.
    `mean`: r - mean (Dr. GRPO, arXiv 2503.20783): no division, so hard and easy prompts are not weighted up.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2 or np.ptp(values) == 0.0:
        return np.zeros(values.size)
    centred: NDArray[np.float64] = values - values.mean()
    if kind == "mean":
        return centred
    centred /= values.std(ddof=1) + STD_FLOOR
    return centred
