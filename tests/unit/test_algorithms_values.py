import numpy as np
import pytest
import torch

from forebay.training.algorithms.values import value_loss

CLIP = 0.5


def reference(value: float, old: float, target: float) -> float:
    bounded = min(max(value, old - CLIP), old + CLIP)
    return 0.5 * max((value - target) ** 2, (bounded - target) ** 2)


def test_loss_slopes_and_clipped_tokens_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=400)
    values, targets = old + rng.normal(0, 0.6, 400), old + rng.normal(0, 1.0, 400)
    x = torch.from_numpy(values).requires_grad_()
    loss, clipped = value_loss(x, torch.from_numpy(old), torch.from_numpy(targets), CLIP)
    items = list(zip(values, old, targets, strict=True))
    assert loss.detach().numpy() == pytest.approx([reference(*i) for i in items], rel=1e-12)
    loss.sum().backward()
    h = 1e-6
    slopes = [(reference(v + h, o, r) - reference(v - h, o, r)) / (2 * h) for v, o, r in items]
    assert x.grad is not None
    assert x.grad.numpy() == pytest.approx(slopes, rel=1e-6, abs=1e-8)
    assert torch.equal(clipped, x.grad == 0)
    assert 0 < int(clipped.sum()) < 400


@pytest.mark.parametrize(
    ("value", "target", "loss", "clipped"),
    [
        (0.2, 1.0, 0.32, False),  # within the clip: half the square of 0.8
        (0.9, 1.0, 0.125, True),  # moved too far towards the target: judged at 0.5
        (0.9, -1.0, 1.805, False),  # moved away: judged where it is, and called back
    ],
)
def test_worked_examples(value: float, target: float, loss: float, clipped: bool) -> None:
    found, flags = value_loss(torch.tensor([value]), torch.zeros(1), torch.tensor([target]), CLIP)
    assert found.tolist() == pytest.approx([loss])
    assert flags.tolist() == [clipped]


def test_no_token_is_flagged_for_a_rounding() -> None:
    """old + (value - old) is not always the value."""
    rng = np.random.default_rng(1)
    values, old, target = (torch.from_numpy(rng.normal(0, s, 5000).astype(np.float32)) for s in (1.0, 0.01, 1.0))
    assert not bool((old + (values - old) == values).all())
    _, clipped = value_loss(values, old, target, 100.0)
    assert not bool(clipped.any())


def test_no_tokens() -> None:
    loss, clipped = value_loss(*torch.zeros(3, 0), CLIP)
    assert loss.shape == clipped.shape == (0,)
