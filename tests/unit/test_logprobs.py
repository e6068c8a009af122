"""`token_logprobs` against float64 loops, finite differences and full logits; packed log-probabilities of a model
against plain transformers, one sequence at a time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forebay.errors import UserError
from forebay.training import token_logprobs as kernel
from forebay.training.attention import packed_attention
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import TrainSequence, pack
from forebay.training.token_logprobs import token_logprobs
from tests.support.tiny_lm import VOCABULARY, make_start_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def draw(
    tokens: int, vocabulary: int, width: int, *, bias: bool = True, seed: int = 0, scale: float = 1.0
) -> list[Any]:
    """[hidden, weight, bias or None, targets], float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return [normal(tokens, width), normal(vocabulary, width), normal(vocabulary) if bias else None, targets]


def converted(inputs: list[Any], dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Leaves that require gradients (targets unchanged)."""
    leaves = [x if x is None else x.to(device, dtype).detach().clone().requires_grad_() for x in inputs[:-1]]
    return [*leaves, inputs[-1].to(device)]


def full_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    every = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def backward(result: tuple[Tensor, Tensor], entropies: bool) -> None:
    """Gradient of a sum with weights of both signs."""
    weights = torch.linspace(-1, 2, len(result[0]), device=result[0].device)
    loss = (result[0] * weights).sum()
    (loss + (result[1] * weights.flip(0)).sum() if entropies else loss).backward()


def gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value if that is above one."""
    found, expected = found.detach().cpu().double(), expected.detach().double()
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max())) if len(expected) else 0.0


def test_values_equal_a_loop() -> None:
    inputs = draw(5, 11, 3)
    hidden, weight, bias, targets = (x.numpy() for x in inputs)
    temperature = 0.7
    found, entropies = token_logprobs(*inputs, temperature, tile=12)
    for i in range(5):
        logits = [(sum(hidden[i, k] * weight[j, k] for k in range(3)) + bias[j]) / temperature for j in range(11)]
        total = math.log(math.fsum(math.exp(z) for z in logits))
        assert found[i] == pytest.approx(logits[targets[i]] - total, abs=1e-12)
        entropy = -math.fsum(math.exp(z - total) * (z - total) for z in logits)
        assert entropies[i] == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_equal_finite_differences(with_bias: bool) -> None:
    *leaves, targets = converted(draw(5, 11, 3, bias=with_bias), torch.float64)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, bias, targets, 0.7, entropy_gradient=True, tile=12)

    assert torch.autograd.gradcheck(function, leaves)


@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(1, 90),
    width=st.integers(1, 9),
    tile=st.integers(1, 5000),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    entropy=st.booleans(),
    device=st.sampled_from(DEVICES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_tile_equals_full_logits(
    tokens: int,
    vocabulary: int,
    width: int,
    tile: int,
    bias: bool,
    temperature: float,
    entropy: bool,
    device: str,
    seed: int,
) -> None:
    inputs = draw(tokens, vocabulary, width, bias=bias, seed=seed)
    mine, exact = converted(inputs, torch.float32, device), converted(inputs, torch.float64)
    found = token_logprobs(*mine, temperature, entropy_gradient=entropy, tile=tile)
    expected = full_logits(*exact, temperature)
    backward(found, entropy)
    backward(expected, entropy)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert gap(found[0], expected[0]) < 1e-5
    assert gap(found[1], expected[1]) < 1e-5
    for x, y in zip(mine[:-1], exact[:-1], strict=True):
        assert x is None or gap(x.grad, y.grad) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_give_float32_results(device: str) -> None:
    """Exact for the weights as they are; gradients are rounded, but only once."""
    inputs = draw(300, 500, 64, scale=0.3)
    mine = converted(inputs, torch.bfloat16, device)
    exact = converted([*(x.detach().cpu() for x in mine[:-1]), inputs[-1]], torch.float64)
    before = torch.backends.mkldnn.matmul.fp32_precision
    found = token_logprobs(*mine, 0.9, tile=5000)
    expected = full_logits(*exact, 0.9)
    backward(found, False)
    backward(expected, False)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert found[0].dtype == found[1].dtype == torch.float32
    assert gap(found[0], expected[0]) < 1e-5
    assert gap(found[1], expected[1]) < 1e-5
    for x, y in zip(mine[:-1], exact[:-1], strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad.cpu().double() - y.grad).norm() < 4e-3 * y.grad.norm()


def test_a_sure_token_keeps_its_small_gradient_in_bfloat16() -> None:
    """1 - p is 0.0025 here, less than bfloat16 tells from 0 beside 1."""
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[6.0], [0.0]], dtype=torch.bfloat16)
    weight.requires_grad_()
    token_logprobs(hidden, weight, None, torch.tensor([0]))[0].sum().backward()
    assert weight.grad is not None
    expected = 1 / (1 + math.exp(6.0))
    assert weight.grad[:, 0].tolist() == pytest.approx([expected, -expected], rel=4e-3)


def test_entropies_have_no_gradient_unless_asked_for() -> None:
    inputs = converted(draw(4, 9, 3), torch.float32)
    found, entropies = token_logprobs(*inputs)
    assert found.requires_grad
    assert not entropies.requires_grad
    token_logprobs(*inputs, entropy_gradient=True)[1].sum().backward()
    assert inputs[1].grad.abs().max() > 0


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    inputs = converted(draw(4, 9, 3), torch.float32)
    inputs[frozen].requires_grad_(False)
    token_logprobs(*inputs)[0].sum().backward()
    assert [x.grad is None for x in inputs[:3]] == [i == frozen for i in range(3)]


def test_huge_logits_stay_finite() -> None:
    inputs = draw(6, 40, 4, scale=60.0)
    mine, exact = converted(inputs, torch.float32), converted(inputs, torch.float64)
    found, expected = token_logprobs(*mine, entropy_gradient=True, tile=30), full_logits(*exact, 1.0)
    backward(found, True)
    assert gap(found[0], expected[0]) < 1e-5
    assert all(torch.isfinite(x).all() for x in (*found, *(x.grad for x in mine[:3])))


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    hidden, weight, bias, _ = draw(3, 9, 3)
    found, _ = token_logprobs(hidden, weight, bias, torch.tensor([8, 9, -1]))
    assert found.isnan().tolist() == [False, True, True]


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_no_tensor_is_larger_than_weight_or_tile() -> None:
    inputs = converted(draw(500, 600, 4), torch.float32)
    with _Largest() as largest:
        backward(token_logprobs(*inputs, 0.9, entropy_gradient=True, tile=2000), True)
    assert largest.elements <= max(600 * 4, 500 * 4, 2 * 2000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start_model(tmp_path_factory.mktemp("lm"), hidden=96, layers=3)


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def sequences(seed: int = 0) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    lengths = [(5, 9), (1, 1), (17, 30), (3, 64), (8, 2)]
    return [
        TrainSequence(
            rng.integers(0, VOCABULARY, p).tolist(), rng.integers(0, VOCABULARY, r).tolist(), [0.0] * r, 0, True
        )
        for p, r in lengths
    ]


def one_by_one(
    lm: PreTrainedModel, items: list[TrainSequence], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = [], []
    for item in items:
        ids = torch.tensor([[*item.prompt_ids, *item.ids]])
        logits = lm(input_ids=ids, use_cache=False).logits[0, len(item.prompt_ids) - 1 : -1].double() / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        logprobs.append(distribution.log_prob(torch.tensor(item.ids)))
        entropies.append(distribution.entropy())
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_one_by_one(folder: Path, temperature: float) -> None:
    expected, expected_entropy = one_by_one(plain(folder), sequences(), temperature)
    found, entropy = PolicyModel(plain(folder), temperature).train()(pack(sequences()))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5
    assert (entropy - expected_entropy).abs().max() < 1e-5


@pytest.mark.parametrize("tile", [kernel.CPU_TILE, 700])
def test_gradients_equal_one_by_one_also_in_tiles(folder: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CPU_TILE", tile)
    reference, policy = plain(folder), PolicyModel(plain(folder), 1.0).train()
    weights = torch.linspace(-1, 1, sum(len(s.ids) for s in sequences()))
    (one_by_one(reference, sequences(), 1.0)[0] * weights).sum().backward()
    (policy(pack(sequences()))[0] * weights).sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad - expected[name].grad).abs().max() < 1e-4 * expected[name].grad.abs().max() + 1e-6, name


def test_no_sequence_sees_another(folder: Path) -> None:
    policy = PolicyModel(plain(folder), 1.0)
    first, second = sequences(0), sequences(1)
    with torch.no_grad():
        alone, _ = policy(pack(first[2:3]))
        for neighbours in (first, second):
            packed, _ = policy(pack([neighbours[0], first[2], neighbours[3]]))
            start = len(neighbours[0].ids)
            assert (packed[start : start + len(first[2].ids)] - alone).abs().max() < 1e-5


def test_packed_attention_refuses_masks_and_windows() -> None:
    q = torch.zeros(1, 2, 4, 8)
    packing = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}
    module = torch.nn.Module()
    for bad in ({"sliding_window": 3}, {"softcap": 30.0}, {"s_aux": q}):
        with pytest.raises(UserError, match="not supported"):
            packed_attention(module, q, q, q, None, **packing, **bad)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        packed_attention(module, q, q, q, None)
    with pytest.raises(ValueError, match="no mask"):
        packed_attention(module, q, q, q, torch.ones(1, 1, 4, 4), **packing)
    assert packed_attention(module, q, q, q, None, **packing)[0].shape == (1, 4, 2, 8)


def test_a_model_with_transformed_logits_is_refused() -> None:
    config = Qwen3Config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="transforms its logits"):
        PolicyModel(Qwen3ForCausalLM(config), 1.0)


def test_dropout_is_switched_off() -> None:
    policy = PolicyModel(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=64)), 1.0)
    item = TrainSequence([1, 2], [3, 4, 5], [0.0] * 3, 0.0, True)
    policy.train()
    assert torch.equal(policy(pack([item]))[0], policy(pack([item]))[0])
