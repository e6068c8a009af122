"""DAPO's soft punishment of responses that come near the length limit. No torch."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def overlong_penalty(lengths: ArrayLike, budget: int, buffer: int, penalty: float) -> NDArray[np.float64]:
    """What to add to the rewards of responses of these lengths (tokens); within [-penalty, 0].

    0 up to budget - buffer tokens, from there linearly down to -penalty at `budget` and beyond (DAPO, arXiv 2503.14476,
    equation 13, there with penalty 1). `buffer` 0: no penalty at all.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if buffer == 0:
        return np.zeros(tokens.shape)
    excess: NDArray[np.float64] = np.clip((tokens - (budget - buffer)) / buffer, 0.0, 1.0)
    return excess * -penalty
