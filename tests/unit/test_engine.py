"""What the engine does with models, without DeepSpeed's optimizer (tests/integration/test_trainer.py has that)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
from forebay.training import attention, engine
from tests.support.tiny_lm import make_start_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return RunContext.create(parse_config({"storage": {"scratch": str(tmp_path)}}, "test"))


def load(run: RunContext) -> PreTrainedModel:
    return engine._load_policy(run, torch.float32, torch.device("cpu")).lm


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


def test_a_folder_without_a_model_is_named(run: RunContext) -> None:
    run.start_model.mkdir()
    with pytest.raises(RunError, match="start_model cannot be loaded"):
        load(run)


@pytest.mark.parametrize("shard_bytes", [2 << 30, 4096])
def test_shards_have_hub_names_and_each_tensor_once(
    run: RunContext, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts: transformers fuses the experts in memory; engines expect them apart, as in the file."""
    monkeypatch.setattr(engine, "SHARD_BYTES", shard_bytes)
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(run.start_model)
    lm = AutoModelForCausalLM.from_pretrained(run.start_model, dtype=torch.float32)
    shards = list(engine.full_shards(lm, torch.float32, rank=0))
    assert (len(shards) > 1) == (shard_bytes == 4096)
    named = [item for shard in shards for item in shard]
    expected = load_file(run.start_model / "model.safetensors")
    assert sorted(name for name, _ in named) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named)
    assert list(engine.full_shards(lm, torch.float32, rank=1)) == [[] for _ in shards]


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decayed, plain = engine._parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], [p.ndim for p in decayed["params"]]) == (0.1, [2])
    assert (plain["weight_decay"], [p.ndim for p in plain["params"]]) == (0.0, [1, 1, 1])
