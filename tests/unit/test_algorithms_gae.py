"""GAE against its definition as a sum, against the padded loop that others use, and by hand."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.training.algorithms.advantages import Moments
from forebay.training.algorithms.gae import gae, moments, token_rewards, whiten


def tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.asarray(a)) for a in arrays)


def by_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """One sequence: A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def padded(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """One sequence with masked tokens, as padded implementations do it: value and advantage carried over them."""
    next_value = last = 0.0
    result = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * last
        if mask[t]:
            next_value, last = values[t], advantage
        result[t] = last
    return np.where(mask, result, 0.0)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 7), max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_packed_gae_equals_both_references(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rewards, values = rng.normal(size=(2, len(owner)))
    mask = rng.random(len(owner)) < 0.75
    expected = np.zeros(len(owner))
    for s in range(len(lengths)):
        own = owner == s
        expected[own] = padded(rewards[own], values[own], mask[own], gamma, lam)
        assert expected[own & mask] == pytest.approx(
            by_definition(rewards[own & mask], values[own & mask], gamma, lam), abs=1e-12
        )
    rewards[~mask], values[~mask] = np.nan, np.inf
    advantages, returns = gae(*tensors(rewards, values, owner, mask), gamma, lam)
    assert advantages.numpy() == pytest.approx(expected, abs=1e-12)
    assert returns.numpy() == pytest.approx(np.where(mask, expected + np.where(mask, values, 0), 0), abs=1e-12)


def test_a_worked_example() -> None:
    # deltas: -0.25, -0.25, 0.5; gamma lam = 0.25
    arrays = np.array([0.0, 0.0, 1.0]), np.full(3, 0.5), np.zeros(3, np.int64), np.ones(3, bool)
    advantages, returns = gae(*tensors(*arrays), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.28125, -0.125, 0.5]
    assert returns.tolist() == [0.21875, 0.375, 1.0]


def test_undiscounted_returns_are_the_outcome_whatever_the_critic_says() -> None:
    owner, mask = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 1, 1, 1, 1, 0], bool)
    outcome = np.array([2.0, 2.0, 2.0, -1.0, 5.0, 5.0])
    o, s, m, v = tensors(outcome, owner, mask, np.random.default_rng(0).normal(size=6))
    rewards = token_rewards(o, s, m)
    assert rewards.tolist() == [0, 0, 2, -1, 5, 0]
    _, returns = gae(rewards, v, s, m, 1.0, 1.0)
    assert returns.tolist() == pytest.approx([2, 2, 2, -1, 5, 0])


def test_a_penalty_joins_the_outcome() -> None:
    owner, mask = torch.tensor([0, 0, 1]), torch.tensor([True, True, False])
    penalty = torch.tensor([-0.25, -0.5, torch.nan])
    assert token_rewards(torch.tensor([1.0, 1.0, 1.0]), owner, mask, penalty).tolist() == [-0.25, 0.5, 0.0]


def test_types_and_empty_inputs() -> None:
    none = torch.zeros(0)
    for result in gae(none, none, none.long(), none.bool(), 1.0, 1.0):
        assert result.shape == (0,)
        assert result.dtype == torch.float32
    assert moments(none, none.bool()) == Moments()
    assert token_rewards(none, none.long(), none.bool(), none).shape == (0,)


def test_a_hundred_thousand_tokens_take_well_under_a_second() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4000, 50)
    owner = np.repeat(np.arange(50), lengths)[:100_000]
    rewards, values = rng.normal(size=(2, len(owner))).astype(np.float32)
    arguments = tensors(rewards, values, owner, np.ones(len(owner), bool))
    began = time.process_time()
    advantages, _ = gae(*arguments, 1.0, 0.95)
    assert time.process_time() - began < 1.0
    assert torch.isfinite(advantages).all()


def test_whitening_over_parts_equals_whitening_at_once() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(3, 2, 60)
    mask = rng.random(60) < 0.6
    values[~mask] = np.nan
    parts = [slice(0, 7), slice(7, 7), slice(7, 41), slice(41, 60)]
    batch = Moments()
    for part in parts:
        batch += moments(*tensors(values[part], mask[part]))
    kept = values[mask]
    expected = np.where(mask, (values - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0)
    white = torch.cat([whiten(*tensors(values[part], mask[part]), batch) for part in parts])
    assert white.numpy() == pytest.approx(expected, abs=1e-12)
