"""The weights of every correction against float64 loops; none of them carries a gradient."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from forebay.config.algorithm import AlgorithmConfig, Correction
from forebay.training.algorithms.corrections import Weights, correct

LOW, HIGH = 0.5, 2.0
NAMES: tuple[Correction, ...] = get_args(Correction)


def reference(
    name: Correction, proximal: np.ndarray, behaviour: np.ndarray, sequence: np.ndarray, mask: np.ndarray
) -> tuple[list[float], dict[str, int]]:
    weights, counts = [], dict(clipped=0, masked=0, rejected=0)
    for t in range(len(mask)):
        if not mask[t]:
            weights.append(0.0)
            continue
        own = [s for s in range(len(mask)) if sequence[s] == sequence[t] and mask[s]]
        logs = [min(max(proximal[s] - behaviour[s], -20), 20) for s in own]
        w = math.exp(min(max(proximal[t] - behaviour[t], -20), 20))
        product = math.exp(min(max(math.fsum(logs), -20), 20))
        mean = math.exp(math.fsum(logs) / len(own))
        if name == "decoupled":
            weights.append(w)
        elif name == "tis_token":
            weights.append(min(w, HIGH))
            counts["clipped"] += w > HIGH
        elif name == "tis_sequence":
            weights.append(min(product, HIGH))
            counts["clipped"] += product > HIGH
        elif name == "icepop":
            weights.append(w if LOW <= w <= HIGH else 0.0)
            counts["masked"] += not LOW <= w <= HIGH
        elif name == "reject_sequence":
            weights.append(1.0 if LOW <= mean <= HIGH else 0.0)
            counts["rejected"] += not LOW <= mean <= HIGH
        else:
            weights.append(1.0)
    return weights, counts


def sample(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    lengths = [1, 1, 1, *rng.integers(1, 12, 40)]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    behaviour = -rng.exponential(1.0, len(sequence))
    proximal = behaviour + rng.normal(0, 0.5, len(sequence)) + rng.normal(0, 0.6, len(lengths))[sequence]
    proximal[::37] += 60.0
    mask = rng.random(len(sequence)) < 0.85
    return proximal, behaviour, sequence, mask


def weights(name: Correction, *arrays: np.ndarray) -> Weights:
    return correct(name, *(torch.from_numpy(a) for a in arrays), low=LOW, high=HIGH)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_counts_equal_the_reference(name: Correction) -> None:
    proximal, behaviour, sequence, mask = sample()
    expected, counts = reference(name, proximal, behaviour, sequence, mask)
    # Masked positions are full of rubbish.
    proximal[~mask], behaviour[~mask] = np.nan, -np.inf
    found = weights(name, proximal, behaviour, sequence, mask)
    assert found.weight.numpy() == pytest.approx(expected, rel=1e-12)
    assert {key: int(getattr(found, key)) for key in counts} == counts
    if name in ("tis_token", "tis_sequence", "icepop", "reject_sequence"):
        assert 0 < sum(counts.values()) < mask.sum()


@pytest.mark.parametrize("name", NAMES)
def test_weights_carry_no_gradient(name: Correction) -> None:
    proximal, behaviour, sequence, mask = (torch.from_numpy(a) for a in sample())
    proximal.requires_grad_()
    found = correct(name, proximal, behaviour, sequence, mask, low=LOW, high=HIGH)
    assert not found.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("behaviour", [1, 1, 1, 1]),
        ("none", [1, 1, 1, 1]),
        ("decoupled", [4, 0.5, 1, 0.25]),
        ("tis_token", [2, 0.5, 1, 0.25]),
        ("tis_sequence", [2, 2, 2, 0.25]),
        ("icepop", [0, 0.5, 1, 0]),
        ("reject_sequence", [1, 1, 1, 0]),
    ],
)
def test_worked_example(name: Correction, expected: list[float]) -> None:
    """One response with ratios 4, 1/2, 1 (product 2, geometric mean 2^(1/3)), one of a single token with 1/4."""
    log_w = np.log([4, 0.5, 1, 0.25])
    found = weights(name, log_w, np.zeros(4), np.array([0, 0, 0, 1]), np.ones(4, bool))
    assert found.weight.tolist() == pytest.approx(expected)


def test_products_over_a_response_are_clamped_too() -> None:
    log_w, same = np.array([-15.0, -15.0, 15.0, 15.0]), np.array([0, 0, 1, 1])
    found = correct(
        "tis_sequence",
        *(torch.from_numpy(a) for a in (log_w, np.zeros(4), same, np.ones(4, bool))),
        low=LOW,
        high=1e12,
    )
    assert found.weight.tolist() == pytest.approx([math.exp(-20)] * 2 + [math.exp(20)] * 2, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equal_policies_weigh_one_and_nothing_is_dropped(name: Correction) -> None:
    _, behaviour, sequence, mask = sample()
    found = weights(name, behaviour, behaviour, sequence, mask)
    assert torch.equal(found.weight, torch.from_numpy(mask).double())
    assert float(found.clipped + found.masked + found.rejected) == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_and_the_type_of_the_inputs(name: Correction) -> None:
    none = torch.zeros(0)
    found = correct(name, none, none, none.long(), none.bool(), low=LOW, high=HIGH)
    assert found.weight.shape == (0,)
    assert found.weight.dtype == torch.float32
    assert float(found.clipped + found.masked + found.rejected) == 0


def test_a_trained_token_that_is_not_a_number_is_not_hidden() -> None:
    for name in ("decoupled", "tis_token", "tis_sequence"):
        found = weights(name, np.array([np.nan, 0.0]), np.zeros(2), np.array([0, 1]), np.ones(2, bool))
        assert math.isnan(float(found.weight[0]))
        assert float(found.weight[1]) == 1


def test_which_correction_is_active() -> None:
    assert AlgorithmConfig().active_correction == "behaviour"
    for name in NAMES:
        assert AlgorithmConfig(correction=name).active_correction == name
