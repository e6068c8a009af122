"""What is done with models before and beside the optimizer; tests/integration/test_backends.py has the steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forebay.config import parse_config
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.training import attention, backend, engine, fsdp2, zero
from forebay.training.distributed import Ranks
from tests.support.tiny_lm import make_start_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_run(folder: Path, dtype: str = "float32", **training: Any) -> RunContext:
    values = {"storage": {"scratch": str(folder)}, "model": {"dtype": dtype}, "training": training}
    return RunContext.create(parse_config(values, "test"))


def make_moe(folder: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return make_run(tmp_path)


def load(run: RunContext, rank: int = 0) -> PreTrainedModel:
    return engine.load_policy(run, Ranks(rank, 2, CPU, None)).lm  # type: ignore[arg-type]


def test_a_model_whose_sequences_see_each_other_is_refused(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = attention.packed_attention

    def leaking(*args: Any, cu_seq_lens_q: torch.Tensor, **options: Any) -> Any:
        return correct(*args, cu_seq_lens_q=cu_seq_lens_q[[0, -1]], **options)

    make_start_model(run.start_model)
    load(run)
    monkeypatch.setattr(attention, "packed_attention", leaking)
    with pytest.raises(UserError, match="other log-probabilities for packed sequences than for single ones"):
        load(run)


def test_sliding_windows_are_refused(run: RunContext) -> None:
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).save_pretrained(run.start_model)
    with pytest.raises(UserError, match="sliding window"):
        load(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_without_a_model_is_named(run: RunContext, rank: int) -> None:
    run.start_model.mkdir()
    with pytest.raises(RunError, match="start_model cannot be loaded"):
        load(run, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_critic_is_the_start_model_or_another_that_knows_its_tokens(tmp_path: Path, rank: int) -> None:
    ranks = Ranks(rank, 2, CPU, None)  # type: ignore[arg-type]
    run, own, small = (
        RunContext.create(parse_config({"storage": {"scratch": str(tmp_path / name)}, "critic": critic}, "test"))
        for name, critic in (("a", {}), ("b", {"model": "other"}), ("c", {"model": "small"}))
    )
    for each in (run, own, small):
        make_start_model(each.start_model)
    make_start_model(own.critic_model, hidden=64)
    make_moe(small.critic_model)
    policy = engine.load_policy(run, ranks)
    assert engine.load_critic(run, ranks, policy).head.weight.shape == (1, 32)
    critic = engine.load_critic(own, ranks, policy)
    assert critic.head.weight.shape == (1, 64)
    assert all(p.is_meta for p in critic.trunk.parameters()) == (rank == 1)
    with pytest.raises(UserError, match=r"critic\.model small knows 64 tokens, the policy 102"):
        engine.load_critic(small, ranks, policy)


@pytest.mark.parametrize("make", [make_start_model, make_moe])
def test_other_ranks_build_the_same_model_without_memory(run: RunContext, make: Any) -> None:
    make(run.start_model)
    read, outline = load(run), load(run, rank=1)
    assert all(p.is_meta for p in outline.parameters())
    shapes = [[(n, t.shape, t.dtype) for n, t in [*m.named_parameters(), *m.named_buffers()]] for m in (read, outline)]
    assert shapes[0] == shapes[1]
    ties = [m.lm_head.weight is m.model.embed_tokens.weight for m in (read, outline)]
    assert ties[0] == ties[1] == (make is make_start_model)


def test_parameters_get_memory_one_by_one_and_stay_tied(run: RunContext) -> None:
    make_start_model(run.start_model)
    lm = load(run, rank=1)
    parameters = backend.allocate(lm.modules(), CPU, torch.bfloat16)
    next(parameters)
    assert sum(not p.is_meta for p in lm.parameters()) == 1
    rest = list(parameters)
    assert {id(p) for p in rest} < {id(p) for p in lm.parameters()}
    assert all(p.device == CPU and p.dtype == torch.bfloat16 for p in lm.parameters())
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


@pytest.mark.parametrize(("chosen", "large", "expected"), [(True, False, True), (False, True, False)])
@pytest.mark.parametrize("rank", [0, 1])
def test_activation_checkpointing_is_as_chosen(
    tmp_path: Path, chosen: bool, large: bool, expected: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RECOMPUTE_FROM", 1 if large else 1 << 40)
    run, automatic = (make_run(tmp_path, activation_checkpointing=c) for c in (chosen, "auto"))
    for each in (run, automatic):
        make_start_model(each.start_model)
    assert load(run, rank).is_gradient_checkpointing == expected
    assert load(automatic, rank).is_gradient_checkpointing == large


class Whole:
    """Gathers what is whole already."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[tuple[int, int]]()
        """(tensors, bytes) of each call."""

    def gather(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        self.calls.append((len(tensors), sum(t.numel() * dtype.itemsize for t in tensors)))
        return [t.detach().to(dtype, copy=True) for t in tensors] if self.rank == 0 else []


@pytest.mark.parametrize("shard_bytes", [2 << 30, 4096])
def test_shards_have_hub_names_and_each_tensor_once(
    run: RunContext, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts: transformers fuses the experts in memory; engines expect them apart, as in the file."""
    monkeypatch.setattr(backend, "SHARD_BYTES", shard_bytes)
    make_moe(run.start_model)
    lm = AutoModelForCausalLM.from_pretrained(run.start_model, dtype=torch.float32)
    whole, other = Whole(0), Whole(1)
    shards = list(backend.full_shards(lm, whole, torch.float32, rank=0))  # type: ignore[arg-type]
    assert (len(shards) > 1) == (shard_bytes == 4096)
    assert all(count == 1 or nbytes <= shard_bytes for count, nbytes in whole.calls)
    named = [item for shard in shards for item in shard]
    expected = load_file(run.start_model / "model.safetensors")
    assert sorted(name for name, _ in named) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named)
    assert list(backend.full_shards(lm, other, torch.float32, rank=1)) == [[] for _ in shards]  # type: ignore[arg-type]
    assert other.calls == whole.calls


def test_only_matrices_decay(run: RunContext) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    partitioned = model[1].weight  # as ZeRO-3 leaves a matrix
    partitioned.ds_shape = (2, 2)  # type: ignore[attr-defined]
    training = make_run(run.scratch, weight_decay=0.1).config.training
    optimizer = backend.adamw(model, {p: p for p in model.parameters()}, training)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(partitioned)]
    assert [id(p) for p in plain["params"]] == [id(model[1].bias)]


def test_a_state_that_does_not_fit_is_refused() -> None:
    weights = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weights])
    weights.grad = torch.ones(4)
    optimizer.step()
    state = backend.pack_state([weights], optimizer)
    assert sorted(state) == ["0.exp_avg", "0.exp_avg_sq", "0.master", "0.step"]
    other = nn.Parameter(torch.ones(5))
    with pytest.raises(RunError, match="partition 0 is not of 5 weights"):
        backend.unpack_state(state, [other], torch.optim.AdamW([other]))
    assert torch.equal(other, torch.ones(5))


def test_weights_tied_across_layers_are_refused_by_fsdp2() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(2, 2)

    model = Model()
    parts = fsdp2._parts(model)
    assert [part for part, _ in parts] == [model.blocks[1], model.blocks[0], model]
    assert model.blocks[0].linear not in parts[-1][1]
    model.head.weight = model.blocks[1].linear.weight
    with pytest.raises(UserError, match="ties weights across layers"):
        fsdp2._parts(model)


@pytest.mark.parametrize(
    ("dtype", "stage", "offload", "expected"),
    [
        ("float32", 0, "none", {"stage": 0}),
        ("bfloat16", 0, "none", {"stage": 1}),
        ("bfloat16", 2, "optimizer", {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}),
        (
            "float32",
            3,
            "all",
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 100_000,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
        ),
    ],
)
def test_deepspeed_is_told_the_stage_and_the_offload(
    tmp_path: Path, dtype: str, stage: int, offload: str, expected: dict[str, Any]
) -> None:
    config = make_run(tmp_path, dtype, zero_stage=stage, offload=offload).config
    settings = zero.deepspeed_config(config, cuda=True)
    assert settings["zero_optimization"] == {"overlap_comm": False, **expected}
    assert settings["bf16"]["enabled"] == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"zero_stage": 0, "offload": "optimizer"}, "needs training.zero_stage 1 or more, not 0"),
        ({"zero_stage": 2, "offload": "all"}, "needs training.zero_stage 3 or more, not 2"),
        ({"backend": "fsdp2", "offload": "optimizer"}, "set training.offload=all or none"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config({"training": training}, "test")
