"""Packed log-probabilities against plain transformers, one sequence at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forebay.errors import UserError
from forebay.training import logprobs
from forebay.training.attention import packed_attention
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import TrainSequence, pack
from tests.support.tiny_lm import VOCABULARY, make_start_model


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


@pytest.mark.parametrize("chunk_elements", [1 << 26, 7 * VOCABULARY])
def test_gradients_equal_one_by_one_also_in_chunks(
    folder: Path, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
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
