"""The routers' load-balancing loss against transformers' own, and inside the learner against a plain loop."""

from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from forebay.config import parse_config
from forebay.errors import UserError
from forebay.training import zero
from forebay.training.batches import decode_chunk
from forebay.training.learner import Learner
from forebay.training.logprobs import PolicyModel
from forebay.training.random_models import save_random_model
from forebay.training.routers import Routers, balance_loss
from tests.unit.test_learner import Alone, PlainBackend

EXPERTS, CHOSEN, TEMPERATURE, COEFFICIENT = 8, 2, 0.8, 0.7


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    save_random_model("qwen3_moe", 0, folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def test_each_sequence_has_the_loss_that_transformers_gives_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3 + 1 + 20, EXPERTS, generator=generator, requires_grad=True)
    found = balance_loss(logits, torch.tensor([0, 3, 4, 24]), CHOSEN)
    expected = [load_balancing_loss_func((part,), EXPERTS, CHOSEN) for part in logits.split([3, 1, 20])]
    assert found.tolist() == pytest.approx([e.item() for e in expected], rel=1e-5)
    weights = torch.tensor([0.3, 2.0, -1.0])
    gradients = [torch.autograd.grad((weights * x).sum(), logits)[0] for x in (found, torch.stack(expected))]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert balance_loss(torch.eye(EXPERTS) * 0, torch.tensor([0, EXPERTS]), EXPERTS).item() == pytest.approx(EXPERTS)


def test_a_dense_model_has_no_routers(tmp_path: Path) -> None:
    save_random_model("qwen3", 0, tmp_path)
    with pytest.raises(UserError, match="Qwen3ForCausalLM has no routers"):
        Routers(load(tmp_path))


def test_zero3_gathers_a_block_of_experts_as_one(moe: Path, tmp_path: Path) -> None:
    from deepspeed.utils import get_z3_leaf_modules

    save_random_model("qwen3", 0, tmp_path)
    experts, dense = load(moe), load(tmp_path)
    for lm in (experts, dense):
        zero.mark_leaves(lm)
    assert [type(leaf).__name__ for leaf in get_z3_leaf_modules(experts)] == ["Qwen3MoeSparseMoeBlock"] * 2
    assert get_z3_leaf_modules(dense) == []


def groups() -> list[dict[str, Any]]:
    generator, found = torch.Generator().manual_seed(3), []
    for number, prompt in enumerate(([5, 6, 7], [8, 9])):
        samples = []
        for member, length in enumerate((4, 12, 7) if number else (9, 1, 3)):
            ids = torch.randint(2, 250, (length,), generator=generator).tolist()
            behaviour = (-5.5 + 0.3 * torch.randn(length, generator=generator)).tolist()
            samples.append({"ids": ids, "logprobs": behaviour, "reward": float(member == 0), "oldest_version": 3})
        found.append({"group_id": number, "prompt_ids": prompt, "samples": samples})
    return found


def learnt(moe: Path, coefficient: float, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(gradients, metrics) of the learner; `settings` of training, and the aggregation."""
    algorithm = {"router_aux_loss": coefficient, "aggregation": settings.pop("aggregation", "token_mean")}
    values = {"generation": {"temperature": TEMPERATURE, "max_new_tokens": 12}, "model": {"max_model_len": 32}}
    config = parse_config(values | {"algorithm": algorithm, "training": {"micro_batch_tokens": 32} | settings}, "test")
    policy = PolicyModel(load(moe).eval(), TEMPERATURE)
    if coefficient:
        policy.routers = Routers(policy.lm)
    backend: Any = PlainBackend(policy)
    ranks: Any = Alone()
    learner = Learner(config, ranks, policy.lm, backend)
    body = msgpack.packb({"step": 1, "version": 3, "complete": True, "groups": groups()})
    learner.accumulate(decode_chunk(body, config.algorithm, 12))
    metrics = learner.update(1)
    return backend.gradients, metrics


def balance(moe: Path, aggregation: str) -> tuple[dict[str, torch.Tensor], float]:
    """(gradients, value) of the aggregated balance loss alone, one sequence at a time, by transformers' own router
    outputs and loss."""
    lm, loss = load(moe).eval(), torch.zeros(())
    sequences = [(group["prompt_ids"], s["ids"]) for group in groups() for s in group["samples"]]
    tokens = sum(len(ids) for _, ids in sequences)
    for prompt, ids in sequences:
        layers = lm(torch.tensor([[*prompt, *ids]]), output_router_logits=True).router_logits
        mean = sum(load_balancing_loss_func((layer,), EXPERTS, CHOSEN) for layer in layers) / len(layers)
        weight = {"token_mean": len(ids) / tokens, "sequence_mean": 1 / len(sequences)}[aggregation]
        loss = loss + weight * mean
    loss.backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_learner_adds_the_aggregated_loss_of_the_routers(moe: Path, aggregation: str) -> None:
    without, plain_metrics = learnt(moe, 0.0, aggregation=aggregation)
    found, metrics = learnt(moe, COEFFICIENT, aggregation=aggregation)
    expected, value = balance(moe, aggregation)
    assert metrics["loss"] - plain_metrics["loss"] == pytest.approx(COEFFICIENT * value, rel=1e-4)
    assert "router_balance" not in plain_metrics
    if aggregation == "token_mean":
        assert metrics["router_balance"] == pytest.approx(value, rel=1e-5)
    assert any("mlp.gate.weight" in name and float(g.abs().max()) > 1e-3 for name, g in expected.items())
    for name, plain in without.items():
        added = COEFFICIENT * expected[name] if name in expected else torch.zeros_like(plain)
        torch.testing.assert_close(found[name] - plain, added, rtol=1e-3, atol=1e-5)


def test_no_packing_changes_it(moe: Path) -> None:
    one, other = (learnt(moe, COEFFICIENT, micro_batch_tokens=budget)[0] for budget in (32, 4096))
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-6)
