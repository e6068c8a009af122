"""Policy losses against plain float64 loops, worked examples, and the meaning of `clipped`."""

import math

import numpy as np
import pytest
import torch

from forebay.training.algorithms.policy_losses import PolicyLoss, cispo, gspo, ppo

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
CLIP = dict(clip_low=LOW, clip_high=HIGH)


def ppo_reference(logprob: float, old: float, advantage: float, dual: float | None) -> float:
    """The objective of the paper, term by term."""
    ratio = math.exp(logprob - old)
    objective = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-ratios from -3 to 3: every clip is met."""
    rng = np.random.default_rng(0)
    old = -rng.exponential(2.0, 500)
    return old + rng.normal(0, 0.9, 500), old, rng.normal(0, 1, 500) * (rng.random(500) < 0.9)


def with_gradient(loss: PolicyLoss, x: torch.Tensor) -> np.ndarray:
    loss.loss.sum().backward()
    assert x.grad is not None
    assert not loss.ratio.requires_grad
    return x.grad.numpy()


@pytest.mark.parametrize("dual", [None, DUAL])
def test_ppo_equals_the_reference_and_its_slopes(dual: float | None) -> None:
    logprobs, old, advantages = tokens()
    x = torch.from_numpy(logprobs).requires_grad_()
    result = ppo(x, torch.from_numpy(old), torch.from_numpy(advantages), **CLIP, dual_clip=dual)
    items = list(zip(logprobs, old, advantages, strict=True))
    assert result.loss.detach().numpy() == pytest.approx([ppo_reference(*i, dual) for i in items], rel=1e-12)
    assert result.ratio.numpy() == pytest.approx(np.exp(logprobs - old), rel=1e-12)
    h = 1e-6
    slopes = [(ppo_reference(p + h, b, a, dual) - ppo_reference(p - h, b, a, dual)) / (2 * h) for p, b, a in items]
    gradient = with_gradient(result, x)
    assert gradient == pytest.approx(slopes, rel=1e-6, abs=1e-8)
    assert torch.equal(result.clipped, torch.from_numpy((gradient == 0) & (advantages != 0)))
    assert 0 < int(result.clipped.sum()) < 500


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "clipped"),
    [
        (1.0, 2.0, None, -2.0, False),
        (1.5, 1.0, None, -1.28, True),
        (0.5, 1.0, None, -0.5, False),
        (1.5, -1.0, None, 1.5, False),
        (0.5, -1.0, None, 0.8, True),
        (5.0, -1.0, None, 5.0, False),
        (5.0, -1.0, 3.0, 3.0, True),
        (5.0, 1.0, 3.0, -1.28, True),
        (5.0, 0.0, 3.0, 0.0, False),
    ],
)
def test_ppo_worked_examples(ratio: float, advantage: float, dual: float | None, loss: float, clipped: bool) -> None:
    x = torch.tensor([math.log(ratio)])
    result = ppo(x, torch.zeros(1), torch.tensor([advantage]), **CLIP, dual_clip=dual)
    assert result.loss.tolist() == pytest.approx([loss])
    assert result.clipped.tolist() == [clipped]


def test_the_paper_clip_is_harder_below_than_above() -> None:
    ratios = torch.linspace(0.5, 1.6, 111)
    up = ppo(ratios.log(), torch.zeros(111), torch.ones(111), **CLIP).clipped
    down = ppo(ratios.log(), torch.zeros(111), -torch.ones(111), **CLIP).clipped
    assert float(ratios[up].min()) == pytest.approx(1.29, abs=1e-4)
    assert float(ratios[down].max()) == pytest.approx(0.79, abs=1e-4)


def test_a_vanishing_probability_gives_a_finite_gradient() -> None:
    x = torch.tensor([-0.1, -200.0, -0.1, -200.0, -0.1], requires_grad=True)
    old = torch.tensor([-200.0, -0.1, -200.0, -0.1, -200.0])
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 0.0])
    result = ppo(x, old, advantages, **CLIP)
    gradient = with_gradient(result, x)
    assert torch.isfinite(result.loss).all()
    assert np.isfinite(gradient).all()
    assert gradient.tolist() == [0.0] * 5
    assert result.clipped.tolist() == [True] * 4 + [False]
    for other in (
        gspo(x, old, advantages, torch.arange(5), torch.ones(5, dtype=torch.bool), **CLIP),
        cispo(x, old, advantages, **CLIP),
    ):
        assert torch.isfinite(other.loss).all()
        assert torch.isfinite(torch.autograd.grad(other.loss.sum(), x)[0]).all()


def sequences() -> tuple[np.ndarray, ...]:
    """(logprobs, old, one advantage for all tokens of a sequence, sequence, mask); lengths 1 to 30, some masked."""
    rng = np.random.default_rng(3)
    lengths = [1, 1, *rng.integers(2, 30, 30)]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    old = -rng.exponential(2.0, len(sequence))
    logprobs = old + rng.normal(0, 0.5, len(sequence)) + rng.normal(0, 0.4, len(lengths))[sequence]
    return logprobs, old, rng.normal(0, 1, len(lengths))[sequence], sequence, rng.random(len(sequence)) < 0.8


def gspo_sequence(logprobs: np.ndarray, old: np.ndarray, advantage: float) -> tuple[float, float, bool]:
    """(sequence objective, s, clipped) as in equations 5 and 7: the clip of s itself."""
    s = math.exp(sum(logprobs - old) / len(old))
    value = min(s * advantage, min(max(s, 1 - LOW), 1 + HIGH) * advantage)
    return value, s, value != s * advantage


def test_gspo_equals_the_sequence_objective_in_value_and_gradient() -> None:
    logprobs, old, advantages, sequence, mask = sequences()
    garbage = logprobs.copy()
    garbage[~mask] = np.nan
    x = torch.from_numpy(garbage).requires_grad_()
    data = [torch.from_numpy(a) for a in (np.where(mask, old, np.inf), np.where(mask, advantages, 0), sequence, mask)]
    result = gspo(x, *data, **CLIP)
    per_sequence, clipped = 0.0, 0
    expected = np.zeros(len(mask))
    h = 1e-6
    for s in range(sequence.max() + 1):
        own = np.flatnonzero((sequence == s) & mask)
        if not len(own):
            continue
        objective, ratio, is_clipped = gspo_sequence(logprobs[own], old[own], advantages[own[0]])
        clipped += is_clipped
        assert result.loss.detach().numpy()[own] == pytest.approx([-objective] * len(own), rel=1e-12)
        assert result.ratio.numpy()[own] == pytest.approx([ratio] * len(own), rel=1e-12)
        assert result.clipped.numpy()[own].tolist() == [is_clipped] * len(own)
        per_sequence += 1
        for k, t in enumerate(own):
            up, down = logprobs[own].copy(), logprobs[own].copy()
            up[k] += h
            down[k] -= h
            expected[t] = -(
                gspo_sequence(up, old[own], advantages[t])[0] - gspo_sequence(down, old[own], advantages[t])[0]
            ) / (2 * h)
    # Sequence-mean aggregation of the token form.
    lengths = np.array([max(((sequence == sequence[t]) & mask).sum(), 1) for t in range(len(mask))])
    kept = torch.from_numpy(np.flatnonzero(mask))
    (result.loss / torch.from_numpy(lengths))[kept].sum().backward()
    assert x.grad is not None
    assert x.grad.numpy()[mask] == pytest.approx(expected[mask], rel=1e-6, abs=1e-9)
    assert 0 < clipped < per_sequence


def test_gspo_worked_example() -> None:
    # Ratios 2 and 1/2: the sequence did not move. Ratios 4 and 1: it moved by 2, over the clip. A single token: PPO.
    x = torch.tensor([2.0, 0.5, 4.0, 1.0, 1.1]).log()
    sequence, mask = torch.tensor([0, 0, 1, 1, 2]), torch.ones(5, dtype=torch.bool)
    result = gspo(x, torch.zeros(5), torch.ones(5), sequence, mask, **CLIP)
    assert result.ratio.tolist() == pytest.approx([1, 1, 2, 2, 1.1])
    assert result.loss.tolist() == pytest.approx([-1, -1, -1.28, -1.28, -1.1])
    assert result.clipped.tolist() == [False, False, True, True, False]


def test_cispo_is_reinforce_with_clipped_weights() -> None:
    logprobs, old, advantages = tokens()
    x = torch.from_numpy(logprobs).requires_grad_()
    result = cispo(x, torch.from_numpy(old), torch.from_numpy(advantages), **CLIP)
    weights = [min(max(math.exp(p - b), 1 - LOW), 1 + HIGH) for p, b in zip(logprobs, old, strict=True)]
    assert result.loss.detach().numpy() == pytest.approx(-np.array(weights) * advantages * logprobs, rel=1e-12)
    assert with_gradient(result, x) == pytest.approx(-np.array(weights) * advantages, rel=1e-12)
    outside = (np.exp(logprobs - old) < 1 - LOW) | (np.exp(logprobs - old) > 1 + HIGH)
    assert result.clipped.tolist() == (outside & (advantages != 0)).tolist()


def test_no_tokens() -> None:
    none = torch.zeros(0, requires_grad=True)
    for result in (
        ppo(none, none, none, **CLIP, dual_clip=3.0),
        gspo(none, none, none, none.long(), none.bool(), **CLIP),
        cispo(none, none, none, **CLIP),
    ):
        assert result.loss.shape == result.ratio.shape == result.clipped.shape == (0,)
        assert result.loss.sum().item() == 0
