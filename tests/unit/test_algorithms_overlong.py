import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.training.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**9, -1.0)],
)
def test_the_paper_setting(length: int, expected: float) -> None:
    """20480 tokens, of which the last 4096 are the buffer (section 4.1)."""
    assert overlong_penalty([length], 20480, 4096, 1.0).tolist() == pytest.approx([expected])


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(1, 200), st.integers(1, 200), st.floats(0, 10))
def test_it_is_the_formula_within_its_bounds(lengths: list[int], budget: int, buffer: int, penalty: float) -> None:
    found = overlong_penalty(lengths, budget, buffer, penalty)
    expected = [max(min(-(n - (budget - buffer)) / buffer * penalty, 0.0), -penalty) for n in lengths]
    assert found.tolist() == pytest.approx(expected)
    assert ((found <= 0) & (found >= -penalty)).all()
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(found[order]) <= 0).all()


def test_no_buffer_no_penalty() -> None:
    assert overlong_penalty([5, 10**6], 10, 0, 3.0).tolist() == [0.0, 0.0]
