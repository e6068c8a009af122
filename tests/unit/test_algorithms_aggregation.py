"""Aggregation by its definitions, and the same gradient under any split into ranks, micro-batches and orders."""

from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.algorithm import AlgorithmConfig
from forebay.errors import RunError
from forebay.training.algorithms.aggregation import Aggregation, divisor, token_weights, weighted_sum
from forebay.training.algorithms.token_loss import TokenInputs, token_loss

KINDS: tuple[Aggregation, ...] = get_args(Aggregation)
FIXED = 7


def by_definition(kind: Aggregation, responses: list[np.ndarray]) -> float:
    """The loss of a batch from the losses of the trained tokens of each response."""
    responses = [r for r in responses if len(r)]
    if kind == "token_mean":
        return float(np.concatenate(responses).mean())
    if kind == "sequence_mean":
        return float(np.mean([r.mean() for r in responses]))
    if kind == "sequence_sum":
        return float(np.mean([r.sum() for r in responses]))
    return float(np.mean([r.sum() / FIXED for r in responses]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_definition(kind: Aggregation) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 5, 1, 9, 4]
    sequence = np.repeat(np.arange(5), lengths)
    mask = rng.random(20) < 0.7
    mask[sequence == 4] = False  # a response without trained tokens counts nowhere
    losses = rng.normal(size=20)
    expected = by_definition(kind, [losses[mask & (sequence == s)] for s in range(5)])
    losses[~mask] = rng.choice([np.nan, np.inf], int((~mask).sum()))
    weights = token_weights(kind, torch.from_numpy(sequence), torch.from_numpy(mask))
    assert weights.dtype == torch.float32
    x = torch.from_numpy(losses).requires_grad_()
    total = weighted_sum(x, weights)
    trained = [int((mask & (sequence == s)).sum()) for s in range(5)]
    assert float(total.detach()) / divisor(kind, trained, FIXED) == pytest.approx(expected, rel=1e-6)
    total.backward()
    assert x.grad is not None
    assert x.grad[~torch.from_numpy(mask)].abs().sum() == 0


def test_worked_example() -> None:
    """Two responses of one and three tokens."""
    sequence, mask = torch.tensor([0, 1, 1, 1]), torch.ones(4, dtype=torch.bool)
    loss = torch.tensor([4.0, 1.0, 1.0, 1.0])
    found = {
        kind: float(weighted_sum(loss, token_weights(kind, sequence, mask)) / divisor(kind, [1, 3], FIXED))
        for kind in KINDS
    }
    assert found == pytest.approx(dict(token_mean=7 / 4, sequence_mean=5 / 2, sequence_sum=7 / 2, fixed=7 / 14))


@given(st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=6))
def test_divisors_add_up(parts: list[list[int]]) -> None:
    for kind in KINDS:
        whole = divisor(kind, [n for part in parts for n in part], FIXED)
        assert whole == sum(divisor(kind, part, FIXED) for part in parts)


def test_a_fixed_divisor_needs_a_length() -> None:
    with pytest.raises(RunError, match=r"set algorithm\.fixed_length"):
        divisor("fixed", [1])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_and_padding_weigh_nothing(kind: Aggregation) -> None:
    assert token_weights(kind, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)).shape == (0,)
    weights = token_weights(kind, torch.tensor([0, 0]), torch.tensor([False, False]))
    assert weights.tolist() == [0, 0]
    assert float(weighted_sum(torch.tensor([torch.nan, 1.0]), weights)) == 0
    assert divisor(kind, [], FIXED) == divisor(kind, [0, 0], FIXED) == 0


CONTEXTS, WORDS = 5, 4


@dataclass
class Response:
    """Tokens of one response under a table of logits: context and word of each."""

    contexts: np.ndarray
    words: np.ndarray
    behaviour: np.ndarray
    advantage: float
    mask: np.ndarray


def responses(theta: np.ndarray, rng: np.random.Generator, count: int) -> list[Response]:
    """Log-ratios near -0.5, -0.1, 0, 0.1 and 0.5: far from the clips, where float32 and float64 could part."""
    table = theta - np.log(np.exp(theta).sum(1, keepdims=True))
    result = []
    for _ in range(count):
        n = int(rng.integers(1, 7))
        contexts, words = rng.integers(0, CONTEXTS, n), rng.integers(0, WORDS, n)
        ratios = rng.choice([-0.5, -0.1, 0.0, 0.1, 0.5]) + rng.uniform(-0.01, 0.01, n)
        advantage = float(rng.choice([-1, 1]) * rng.uniform(0.2, 1))
        result.append(Response(contexts, words, table[contexts, words] - ratios, advantage, rng.random(n) < 0.85))
    return result


def gradient(
    theta: np.ndarray, micro_batches: list[list[Response]], config: AlgorithmConfig, dtype: torch.dtype
) -> np.ndarray:
    """Of the undivided loss, summed over micro-batches as backward passes do it."""
    logits = torch.tensor(theta, dtype=dtype, requires_grad=True)
    for micro in micro_batches:
        lengths = [len(r.words) for r in micro] or [1]
        contexts, words, behaviour, mask = (
            np.concatenate([getattr(r, name) for r in micro] or [padding])
            for name, padding in (
                ("contexts", np.zeros(1, np.int64)),
                ("words", np.zeros(1, np.int64)),
                ("behaviour", np.zeros(1)),
                ("mask", np.zeros(1, bool)),
            )
        )
        advantages = np.repeat([r.advantage for r in micro] or [0.0], lengths)
        inputs = TokenInputs(
            behaviour=torch.tensor(behaviour, dtype=dtype),
            advantages=torch.tensor(advantages, dtype=dtype),
            sequence=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            mask=torch.from_numpy(mask),
        )
        logprobs = logits.log_softmax(-1)[torch.from_numpy(contexts), torch.from_numpy(words)]
        result = token_loss(logprobs, inputs, config)
        weighted_sum(result.loss, token_weights(config.aggregation, inputs.sequence, inputs.mask)).backward()
    assert logits.grad is not None
    return logits.grad.double().numpy()


@settings(deadline=None, max_examples=15)
@given(st.data(), st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4))
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_same_under_any_split(
    kind: Aggregation, loss: str, data: st.DataObject, seed: int, count: int, ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    theta = rng.normal(0, 1, (CONTEXTS, WORDS)).astype(np.float32).astype(np.float64)
    batch = responses(theta, rng, count)
    config = AlgorithmConfig.model_validate(
        dict(policy_loss=loss, aggregation=kind, correction=data.draw(st.sampled_from(["behaviour", "tis_sequence"])))
    )
    expected = gradient(theta, [batch], config, torch.float64)
    expected /= max(divisor(kind, [int(r.mask.sum()) for r in batch], FIXED), 1.0)
    # Each response to any micro-batch of any rank; some micro-batches stay empty and become padding.
    order = data.draw(st.permutations(range(count)))
    cells = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    total, divided_by = np.zeros_like(theta), 0.0
    for rank in range(ranks):
        own = [i for i in order if i % ranks == rank]
        micro_batches = [[batch[i] for i in own if cells[i] == cell] for cell in range(3)]
        total += gradient(theta, micro_batches, config, torch.float32)
        divided_by += divisor(kind, [int(batch[i].mask.sum()) for i in own], FIXED)
    assert total / max(divided_by, 1.0) == pytest.approx(expected, abs=1e-6 * max(1.0, np.abs(expected).max()))
