"""The loss and its gradient against a float64 reference in plain numpy and finite differences."""

import numpy as np
import pytest
import torch

from forebay.training.losses import clipped_policy_loss, clipped_tokens, divergence

LOW, HIGH = 0.2, 0.28


def reference(logprob: float, behaviour: float, advantage: float) -> float:
    """PPO's clipped surrogate, case by case."""
    ratio = np.exp(logprob - behaviour)
    if advantage >= 0:
        return -advantage * min(ratio, 1 + HIGH)
    return -advantage * max(ratio, 1 - LOW)


def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    behaviour = -rng.exponential(2.0, 500)
    return behaviour + rng.normal(0, 0.4, 500), behaviour, rng.normal(0, 1, 500)


def test_loss_equals_the_reference() -> None:
    logprobs, behaviour, advantages = tokens()
    loss, ratio = clipped_policy_loss(*map(torch.from_numpy, (logprobs, behaviour, advantages)), LOW, HIGH)
    expected = [reference(*item) for item in zip(logprobs, behaviour, advantages, strict=True)]
    assert loss.numpy() == pytest.approx(expected, rel=1e-12)
    assert ratio.numpy() == pytest.approx(np.exp(logprobs - behaviour), rel=1e-12)


def test_gradient_equals_finite_differences() -> None:
    logprobs, behaviour, advantages = tokens()
    x = torch.from_numpy(logprobs).requires_grad_()
    loss, _ = clipped_policy_loss(x, torch.from_numpy(behaviour), torch.from_numpy(advantages), LOW, HIGH)
    loss.sum().backward()
    h = 1e-6
    slopes = [
        (reference(p + h, b, a) - reference(p - h, b, a)) / (2 * h)
        for p, b, a in zip(logprobs, behaviour, advantages, strict=True)
    ]
    assert x.grad is not None
    assert x.grad.numpy() == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def test_clipped_tokens_are_those_without_gradient() -> None:
    logprobs, behaviour, advantages = map(torch.from_numpy, tokens())
    x = logprobs.clone().requires_grad_()
    loss, ratio = clipped_policy_loss(x, behaviour, advantages, LOW, HIGH)
    loss.sum().backward()
    clipped = clipped_tokens(ratio.detach(), advantages, LOW, HIGH)
    assert x.grad is not None
    assert torch.equal(clipped, x.grad == 0)
    assert 0 < int(clipped.sum()) < len(clipped)


def test_a_vanishing_behaviour_probability_gives_a_finite_gradient() -> None:
    x = torch.tensor([-0.1, -200.0], requires_grad=True)
    loss, _ = clipped_policy_loss(x, torch.tensor([-200.0, -0.1]), torch.tensor([-1.0, 1.0]), LOW, HIGH)
    loss.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(x.grad).all()


def test_divergence_estimates_kl() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8) * 5)
    draws = rng.choice(8, size=200_000, p=p)
    estimate = divergence(torch.from_numpy(np.log(q)[draws]), torch.from_numpy(np.log(p)[draws]))
    assert float(estimate.min()) >= 0
    assert float(estimate.mean()) == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.05)
