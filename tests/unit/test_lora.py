"""Adapters: where they go, what they leave alone, what is published, and what an engine makes of it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from forebay.adapters import base_digests
from forebay.config import LoraConfig, parse_config
from forebay.errors import UserError
from forebay.generation.base import Base, SnapshotRefused
from forebay.generation.weights import SnapshotUpdate, read_snapshot
from forebay.training import backend, lora
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import MicroBatch, TrainSequence, pack
from forebay.training.random_models import save_random_model
from forebay.training.reference import BaseReference
from forebay.training.snapshots import AdapterWriter, SnapshotWriter, verify_files
from tests.support.tiny_lm import make_start_model
from tests.unit.test_engine import Whole

SETTINGS = LoraConfig(rank=4, alpha=6.0)
SEQUENCES = [TrainSequence([3, 4, 5], [6, 7, 8, 9], [0.0] * 4, 0.0, True), TrainSequence([9], [3], [0.0], 0.0, True)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_start_model(tmp_path / "model")


def load(folder: Path) -> PreTrainedModel:
    vision = "vision_config" in json.loads((folder / "config.json").read_text())
    kind: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    lm: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32)
    return lm


def adapted(folder: Path, settings: LoraConfig = SETTINGS, *, moved: bool = True) -> PreTrainedModel:
    """`moved`: the adapters are no longer those of the start."""
    lm = load(folder)
    lora.add_adapters(lm, settings, seed=1)
    for parameter in lm.parameters():
        if moved and parameter.requires_grad:
            parameter.data = 0.1 * torch.randn_like(parameter)
    return lm


def logprobs(lm: Any, batch: MicroBatch | None = None) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = PolicyModel(lm, 0.8)(batch or pack(SEQUENCES))[0]
    return result


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(model: Path) -> None:
    lm = adapted(model, moved=False)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert {name: p.shape for name, p in lora.base_parameters(lm)} == {
        n: p.shape for n, p in load(model).named_parameters()
    }
    assert torch.equal(logprobs(lm), logprobs(load(model)))


def test_other_ranks_build_the_same_adapters_without_memory(model: Path) -> None:
    config = load(model).config
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    lora.add_adapters(outline, SETTINGS, seed=1)
    lm = adapted(model)
    assert all(p.is_meta for p in outline.parameters())
    described = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (lm, outline)]
    assert described[0] == described[1]


def test_targets_are_linear_layers_of_the_decoder(model: Path, tmp_path: Path) -> None:
    chosen = adapted(model, LoraConfig(targets=["q_proj", "down_proj"]))
    kinds = {adapter.weight.split(".")[-2] for adapter in lora.adapters(chosen)}
    assert kinds == {"q_proj", "down_proj"}
    for wrong in ("lm_head", "q_prj"):
        with pytest.raises(UserError, match=f"no linear layer {wrong} in its decoder; it has .*down_proj.*q_proj"):
            adapted(model, LoraConfig(targets=["q_proj", wrong]))
    (tmp_path / "moe").mkdir()
    save_random_model("qwen3_moe", 0, tmp_path / "moe")
    experts = adapted(tmp_path / "moe", LoraConfig())
    assert {a.weight.split(".")[-2] for a in lora.adapters(experts)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_reference_is_the_base_and_the_adapters_are_back_afterwards(model: Path) -> None:
    lm = adapted(model)
    policy, before = PolicyModel(lm, 0.8), lora.adapters(lm)[0].scale

    class Plain:
        def evaluate(self, batch: MicroBatch) -> Any:
            with torch.no_grad():
                return policy(batch)

    reference = BaseReference(lm, Plain())  # type: ignore[arg-type]
    start, moved = logprobs(load(model)), Plain().evaluate(pack(SEQUENCES))[0]
    assert torch.equal(reference.logprobs(pack(SEQUENCES)), start)
    assert torch.equal(Plain().evaluate(pack(SEQUENCES))[0], moved)
    assert float((moved - start).abs().max()) > 0.01
    assert before == 6.0 / 4


def test_dropout_is_in_updates_only(model: Path) -> None:
    policy = PolicyModel(load(model), 0.8).train()
    lora.add_adapters(policy.lm, LoraConfig(rank=4, dropout=0.5), seed=1)
    for adapter in lora.adapters(policy.lm):
        torch.nn.init.normal_(adapter.up, std=0.1)
    with torch.no_grad():
        one, other = policy(pack(SEQUENCES))[0], policy(pack(SEQUENCES))[0]
    assert torch.equal(one, other)
    update = policy(pack(SEQUENCES))[0]
    assert float((update - one).detach().abs().max()) > 0.01
    with torch.no_grad():
        assert torch.equal(policy(pack(SEQUENCES))[0], one)


@pytest.mark.parametrize("shard_bytes", [2 << 30, 4096])
def test_merged_shards_are_what_peft_merges(model: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SHARD_BYTES", shard_bytes)
    lm = adapted(model)
    whole, other = Whole(0), Whole(1)
    before = {name: p.clone() for name, p in lm.named_parameters()}
    shards = list(backend.full_shards(lm, whole, torch.float32, rank=0))  # type: ignore[arg-type]
    assert (len(shards) > 1) == (shard_bytes == 4096)
    assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())
    assert list(backend.full_shards(lm, other, torch.float32, rank=1)) == [[] for _ in shards]  # type: ignore[arg-type]
    assert other.calls == whole.calls
    named = dict(item for shard in shards for item in shard)
    for module in lm.modules():
        if hasattr(module, "lora_A"):
            module.merge()
    expected = {name: p.detach() for name, p in lora.base_parameters(lm)}
    assert named.keys() == expected.keys() == load_file(model / "model.safetensors").keys()
    for name, tensor in named.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_a_published_model_has_the_policys_logprobs(model: Path, tmp_path: Path) -> None:
    lm = adapted(model)
    shards = backend.full_shards(lm, Whole(0), torch.float32, rank=0)  # type: ignore[arg-type]
    SnapshotWriter(model, "float32").write(tmp_path / "v1", 1, shards)
    torch.testing.assert_close(logprobs(load(tmp_path / "v1")), logprobs(lm), rtol=0, atol=1e-5)


def published(lm: PreTrainedModel, model: Path, folder: Path) -> SnapshotUpdate:
    shard = backend.adapter_shard(lm, Whole(0))  # type: ignore[arg-type]
    snapshot = AdapterWriter(model, SETTINGS).write(folder, 1, [shard])
    verify_files(folder, snapshot.manifest_sha256)
    return SnapshotUpdate("stage", str(folder), 1, snapshot.manifest_sha256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "layers"), [("qwen3", 14), ("qwen3_moe", 8), ("qwen2_5_vl", 14)])
def test_an_engine_makes_of_an_adapter_what_the_trainer_would_have_merged(
    tmp_path: Path, architecture: str, layers: int, dtype: torch.dtype
) -> None:
    """Names are those of the files, whatever they are in memory."""
    model = tmp_path / "start"
    model.mkdir()
    save_random_model(architecture, 0, model)
    lm = adapted(model)
    update = published(lm, model, tmp_path / "v1")
    assert sorted(p.name for p in (tmp_path / "v1").iterdir()) == ["adapter_model.safetensors", "manifest.json"]
    found = dict(read_snapshot(update, Base(str(model)), dtype))
    shards = backend.full_shards(lm, Whole(0), dtype, rank=0)  # type: ignore[arg-type]
    expected = dict(item for shard in shards for item in shard)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    files = load_file(model / "model.safetensors")
    assert sum(not torch.equal(tensor.to(dtype), found[name]) for name, tensor in files.items()) == layers


def _another_base(folder: Path, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _change(**tensors: torch.Tensor | None) -> Any:
    def change(folder: Path, model: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        for name, tensor in tensors.items():
            key = name.replace("__", ".")
            if tensor is None:
                del found[key]
            else:
                found[key] = tensor
        save_file(found, path)
        manifest = json.loads((folder / "manifest.json").read_text())
        entries = {n: {"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1]} for n, t in found.items()}
        manifest |= {"tensors": entries, "files": {path.name: {"bytes": 1, "sha256": digest(path)}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


Q_DOWN = "model__layers__0__self_attn__q_proj__lora_A__weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_another_base, "model.safetensors of the served model .* is not the file that it was trained on"),
        (_change(**{Q_DOWN: None}), r"q_proj.weight, .* has A and B of shapes \[None, \[32, 4\]\]"),
        (_change(model__nrm__lora_A__weight=torch.ones(1, 32)), "model.nrm.lora_A.weight belongs to no weight"),
        (_change(**{Q_DOWN: torch.full((4, 32), float("nan"))}), "not finite"),
        (_change(**{Q_DOWN: torch.ones(4, 32, dtype=torch.bfloat16)}), "the engine serves|has type|is torch.bfloat16"),
        (_change(**{Q_DOWN: torch.ones(3, 32)}), r"has A and B of shapes \[\[3, 32\], \[32, 4\]\]"),
    ],
)
def test_what_does_not_fit_the_base_is_refused(model: Path, tmp_path: Path, spoil: Any, message: str) -> None:
    update = published(adapted(model), model, tmp_path / "v1")
    spoil(tmp_path / "v1", model)
    update.manifest_sha256 = digest(tmp_path / "v1" / "manifest.json")
    with pytest.raises(SnapshotRefused, match=message):
        read_snapshot(update, Base(str(model)), torch.float32)


def test_the_base_is_hashed_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "forebay.generation.base.base_digests", lambda folder: calls.append(folder) or base_digests(folder)
    )
    update, base = published(adapted(model), model, tmp_path / "v1"), Base(str(model))
    for _ in range(2):
        read_snapshot(update, base, torch.float32)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"training": {"lora": {}}, "algorithm": {"kl": "loss", "reference": "offload"}},
            "there is none .*: set algorithm.reference=copy",
        ),
        ({"training": {"lora": {}}, "algorithm": {"router_aux_loss": 0.001}}, "training.lora leaves .*: set it to 0"),
        ({"training": {"lora": {"targets": []}}}, "targets"),
        ({"training": {"lora": {"rnk": 8}}}, "rank"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(values, "test")
