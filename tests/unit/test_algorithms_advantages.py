import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.training.algorithms.advantages import GroupAdvantage, Moments, group_advantages

KINDS: tuple[GroupAdvantage, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def reference(rewards: list[float], kind: GroupAdvantage) -> list[float]:
    n, result = len(rewards), []
    mean = math.fsum(rewards) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    for i, r in enumerate(rewards):
        if kind == "grpo":
            result.append((r - mean) / (std + 1e-6))
        elif kind == "rloo":
            result.append(r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (n - 1))
        else:
            result.append(r - mean)
    return result


@given(REWARDS)
def test_advantages_equal_the_reference(rewards: list[float]) -> None:
    for kind in KINDS:
        # Rewards that differ by rounding have advantages of rounding size, which the deviation's floor brings down.
        assert group_advantages(rewards, kind).tolist() == pytest.approx(reference(rewards, kind), rel=1e-9, abs=1e-7)


def test_worked_examples() -> None:
    # mean 0.25; unbiased variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25, deviation 0.5
    assert group_advantages([1, 0, 0, 0], "grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert group_advantages([3.0, 1.0], "dr_grpo").tolist() == [1.0, -1.0]
    assert group_advantages([1, 0, 0, 0], "rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert group_advantages([1, 0, 0, 0], "reinforce_baseline").tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.0] * 7, [0.1] * 7, [1e9] * 7])
def test_no_spread_no_advantage(kind: GroupAdvantage, rewards: list[float]) -> None:
    assert group_advantages(rewards, kind).tolist() == [0.0] * len(rewards)


@given(REWARDS, st.floats(0.5, 50), st.floats(-50, 50))
def test_advantages_sum_to_zero_keep_order_and_shift(rewards: list[float], scale: float, shift: float) -> None:
    moved = [scale * r + shift for r in rewards]
    for kind in KINDS:
        advantages = group_advantages(rewards, kind)
        assert abs(advantages.sum()) < 1e-6
        assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= -1e-12).all()
        if np.std(rewards) > 0.1:
            by = 1.0 if kind == "grpo" else scale
            assert group_advantages(moved, kind) == pytest.approx(by * advantages, abs=1e-3)


@given(
    st.lists(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), max_size=6), max_size=5),
)
def test_whitening_does_not_depend_on_the_split_and_has_mean_0_and_variance_1(
    parts: list[list[tuple[float, int]]],
) -> None:
    batch = Moments()
    for part in parts:
        batch += Moments.of([a for a, _ in part], [n for _, n in part])
    tokens = np.array([a for part in parts for a, n in part for _ in range(n)])
    assert batch.count == len(tokens)
    if len(tokens) < 2:
        assert batch.variance == 0
        return
    assert batch.mean == pytest.approx(tokens.mean(), abs=1e-12)
    assert batch.variance == pytest.approx(tokens.var(ddof=1), rel=1e-9, abs=1e-12)
    white = batch.whiten(tokens)
    assert white == pytest.approx((tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), abs=1e-6)
    if tokens.std() > 0.1:
        assert white.mean() == pytest.approx(0, abs=1e-9)
        assert white.var(ddof=1) == pytest.approx(1, abs=1e-5)


def test_whitening_a_worked_example() -> None:
    # A long good response and a short bad one: token mean (3 * 1 - 1) / 4 = 0.5, unbiased variance (3/4 + 9/4) / 3 = 1
    batch = Moments.of([1.0, -1.0], [3, 1])
    assert (batch.count, batch.mean, batch.variance) == (4, 0.5, 1)
    assert batch.whiten([1.0, -1.0]) == pytest.approx([0.5, -1.5], abs=1e-7)


@pytest.mark.parametrize("values", [[], [2.0], [0.1] * 1000])
def test_whitening_without_spread_gives_zeros(values: list[float]) -> None:
    assert Moments.of(values).whiten(values) == pytest.approx([0.0] * len(values), abs=1e-9)
