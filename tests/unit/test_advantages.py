import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.training.advantages import group_advantages


def test_std_advantages_of_a_worked_example() -> None:
    # mean 0.25; unbiased variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25, deviation 0.5
    assert group_advantages([1, 0, 0, 0], "std") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_mean_advantages_are_not_divided() -> None:
    assert group_advantages([3.0, 1.0], "mean").tolist() == [1.0, -1.0]


@pytest.mark.parametrize("kind", ["std", "mean"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e9])
def test_no_spread_no_advantage(kind: str, reward: float) -> None:
    assert group_advantages([reward] * 7, kind).tolist() == [0.0] * 7


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(0.5, 50), st.floats(-50, 50))
def test_advantages_sum_to_zero_keep_order_and_ignore_the_scale_of_rewards(
    rewards: list[float], scale: float, shift: float
) -> None:
    advantages = group_advantages(rewards, "std")
    assert abs(advantages.sum()) < 1e-6
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= -1e-12).all()
    if np.std(rewards) > 0.1:
        assert group_advantages([scale * r + shift for r in rewards], "std") == pytest.approx(advantages, abs=1e-3)
