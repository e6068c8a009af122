import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.training.algorithms.tokens import (
    kept,
    last_tokens,
    log_ratio,
    sequence_length,
    sequence_mean,
    sequence_sum,
)

LENGTHS = st.lists(st.integers(1, 9), max_size=8)


@given(LENGTHS, st.integers(0, 2**32 - 1), st.sampled_from([1, 40]))
def test_sums_over_sequences_equal_loops(lengths: list[int], seed: int, gap: int) -> None:
    rng = np.random.default_rng(seed)
    # Indices may leave gaps: sequences without response tokens are not packed.
    owner = np.repeat(np.arange(len(lengths)) * gap, lengths)
    mask = rng.random(len(owner)) < 0.7
    values = rng.normal(size=len(owner))
    values[~mask] = rng.choice([np.nan, np.inf, -np.inf], size=int((~mask).sum()))
    total, length, mean, last = [], [], [], []
    for t in range(len(owner)):
        own = [s for s in range(len(owner)) if owner[s] == owner[t] and mask[s]]
        total.append(sum(values[s] for s in own))
        length.append(float(len(own)))
        mean.append(total[-1] / len(own) if own else 0.0)
        last.append(bool(own) and own[-1] == t)
    arguments = torch.from_numpy(owner), torch.from_numpy(mask)
    assert sequence_sum(torch.from_numpy(values), *arguments).tolist() == pytest.approx(total, abs=1e-12)
    assert sequence_length(*arguments).tolist() == length
    assert sequence_mean(torch.from_numpy(values), *arguments).tolist() == pytest.approx(mean, abs=1e-12)
    assert last_tokens(*arguments).tolist() == last


def test_sums_over_long_sequences_keep_their_digits() -> None:
    values = torch.full((100_000,), 1e-3)
    same = torch.zeros(100_000, dtype=torch.int64)
    total = sequence_sum(values, same, torch.ones(100_000, dtype=torch.bool))
    assert float(total[0]) == pytest.approx(float(values[0].double()) * 100_000, rel=1e-12)


def test_sums_over_sequences_carry_no_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    assert not sequence_sum(values, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)).requires_grad


def test_log_ratio_is_clamped() -> None:
    a, b = torch.tensor([0.0, -100.0, 0.0, -1.0]), torch.tensor([-100.0, 0.0, -torch.inf, -3.0])
    assert log_ratio(a, b).tolist() == [20.0, -20.0, 20.0, 2.0]


def test_kept_gives_no_gradient_to_what_is_masked() -> None:
    x = torch.tensor([-torch.inf, 1.0, torch.nan], requires_grad=True)
    kept(x, torch.tensor([False, True, False])).exp().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.0, np.e, 0.0])
