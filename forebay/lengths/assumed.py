"""Assumed response lengths: a log-normal model for planning without an engine, and a predictor of the asked quality.

Invariants: a pure function of the settings and the seed; the first k prompts are the same however many are drawn;
memory is the arrays that are returned plus one chunk.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.config.sections import AssumedLengthsConfig
from forebay.lengths.lognormal import capped_mean

CHUNK = 65_536
"""Prompts drawn at a time."""


@dataclass(frozen=True)
class Assumed:
    """P prompts with n responses each."""

    lengths: NDArray[np.int32]
    """[P, n] response lengths in tokens, in [1, longest]."""
    predicted: NDArray[np.float64]
    """[P] the mean length of a prompt that a calibrated predictor of the asked rank correlation expects."""
    prompt_tokens: NDArray[np.int32]
    """[P]."""
    location: NDArray[np.float64]
    """[P] mean log length that the predictor expects."""
    spread: float
    """Standard deviation of log length around it."""


def draw(prompts: int, group_size: int, assumed: AssumedLengthsConfig, longest: int, seed: int) -> Assumed:
    """Lengths exp(N(ln median, prompt_sd) + N(0, within_sd)), rounded and capped at `longest`.

    The predictor sees a normal score w that has Pearson's correlation 2 sin(pi rho / 6) with the prompt's own one,
    which gives Spearman's rho in a bivariate normal distribution (Pearson, 1907), and predicts E[min(length, longest) |
    w]: a weaker predictor spreads its predictions less, and one with rho = 0 gives every prompt the same. A negative
    rho is that of the mirrored predictor.
    """
    own, error, within = (np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(3))
    r = 2 * math.sin(math.pi * assumed.rank_correlation / 6)
    left = math.sqrt(max(0.0, 1 - r * r))
    location, sd = math.log(assumed.median), assumed.prompt_sd
    spread = math.sqrt((sd * left) ** 2 + assumed.within_sd**2)
    lengths = np.empty((prompts, group_size), dtype=np.int32)
    predicted, expected = np.empty(prompts, dtype=np.float64), np.empty(prompts, dtype=np.float64)
    for start in range(0, prompts, CHUNK):
        end = min(start + CHUNK, prompts)
        score = own.standard_normal(end - start)
        logs = location + sd * score[:, None] + assumed.within_sd * within.standard_normal((end - start, group_size))
        lengths[start:end] = np.clip(np.rint(np.exp(np.minimum(logs, math.log(longest)))), 1, longest)
        seen = r * score + left * error.standard_normal(end - start)
        expected[start:end] = location + sd * abs(r) * seen
        predicted[start:end] = np.maximum(capped_mean(expected[start:end], spread, longest), 1.0)
    return Assumed(lengths, predicted, np.full(prompts, assumed.prompt_tokens, dtype=np.int32), expected, spread)


def prompt_ids(prompts: int) -> list[str]:
    """Ids of assumed prompts: p0000000, p0000001, ..."""
    return [f"p{index:07d}" for index in range(prompts)]
