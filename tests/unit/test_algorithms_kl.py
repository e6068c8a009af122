"""KL estimators: values, and what their gradients are the gradients of, by exact expectation over a small softmax."""

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

from forebay.training.algorithms.kl import Estimator, kl_tokens, reward_penalty

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def reference(logprob: float, other: float, estimator: Estimator) -> float:
    d = min(max(logprob - other, -20.0), 20.0)
    return {"k1": d, "k2": d * d / 2, "k3": min(math.exp(-d) - 1 + d, 10.0)}[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_slopes_equal_the_reference(estimator: Estimator) -> None:
    rng = np.random.default_rng(0)
    other = -rng.exponential(2.0, 300)
    logprobs = other + rng.normal(0, 1.0, 300)
    logprobs[:4] = other[:4] + np.array([30.0, -30.0, 5.0, -5.0])
    x = torch.from_numpy(logprobs).requires_grad_()
    values = kl_tokens(x, torch.from_numpy(other), estimator)
    items = list(zip(logprobs, other, strict=True))
    assert values.detach().numpy() == pytest.approx([reference(*i, estimator) for i in items], rel=1e-10, abs=1e-14)
    values.sum().backward()
    h = 1e-6
    slopes = [(reference(p + h, r, estimator) - reference(p - h, r, estimator)) / (2 * h) for p, r in items]
    assert x.grad is not None
    assert x.grad.numpy() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def softmax(theta: np.ndarray) -> np.ndarray:
    e = np.exp(theta - theta.max())
    return e / e.sum()


def slope(f: Callable[[np.ndarray], float], theta: np.ndarray) -> np.ndarray:
    h = 1e-6
    return np.array([(f(theta + h * e) - f(theta - h * e)) / (2 * h) for e in np.eye(len(theta))])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_each_estimator_gives_as_a_loss_and_as_a_reward(estimator: Estimator) -> None:
    rng = np.random.default_rng(1)
    theta, q = rng.normal(size=6), softmax(rng.normal(size=6))
    p = softmax(theta)
    reverse = slope(lambda t: float((softmax(t) * np.log(softmax(t) / q)).sum()), theta)
    forward = slope(lambda t: float((q * np.log(q / softmax(t))).sum()), theta)
    # Expectation over the policy's own samples: weights p, held fixed, as sampling holds them.
    x = torch.from_numpy(theta).requires_grad_()
    logprobs = x.log_softmax(0)
    values = kl_tokens(logprobs, torch.from_numpy(np.log(q)), estimator)
    in_loss = torch.autograd.grad((torch.from_numpy(p) * values).sum(), x, retain_graph=True)[0].numpy()
    assert in_loss == pytest.approx({"k1": np.zeros(6), "k2": reverse, "k3": forward}[estimator], abs=1e-8)
    if estimator == "k1":
        penalty = reward_penalty(logprobs, torch.from_numpy(np.log(q)), torch.ones(6, dtype=torch.bool), 0.5)
        in_reward = torch.autograd.grad((torch.from_numpy(p) * penalty * logprobs).sum(), x)[0].numpy()
        assert in_reward == pytest.approx(-0.5 * reverse, abs=1e-8)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8) * 5)
    true = float((p * np.log(p / q)).sum())
    for estimator in ("k1", "k3"):
        values = kl_tokens(torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q)), estimator).numpy()
        assert float((p * values).sum()) == pytest.approx(true, rel=1e-9)
    assert (values >= 0).all()


def test_the_penalty_is_detached_and_leaves_masked_tokens_alone() -> None:
    logprobs = torch.tensor([-1.0, torch.nan, -2.0], requires_grad=True)
    penalty = reward_penalty(logprobs, torch.tensor([-2.0, 0.0, -1.5]), torch.tensor([True, False, True]), 0.1)
    assert penalty.tolist() == pytest.approx([-0.1, 0.0, 0.05])
    assert not penalty.requires_grad


def test_extremes_stay_finite() -> None:
    x = torch.tensor([-1000.0, 0.0, -torch.inf], requires_grad=True)
    for estimator in ESTIMATORS:
        values = kl_tokens(x, torch.tensor([0.0, -1000.0, -1.0]), estimator)
        assert torch.isfinite(values).all()
        assert torch.autograd.grad(values.sum(), x)[0].tolist() == [0.0, 0.0, 0.0]
    assert kl_tokens(torch.zeros(0), torch.zeros(0), "k3").shape == (0,)
