"""The memory estimate, piece by piece, against the real things: models on the meta device, tensors that torch saves,
vLLM's cache. What real trainers hold is in tests/integration/test_backends.py."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from forebay.cli import app
from forebay.config import LoraConfig, RunConfig, load_profile, parse_config
from forebay.data.start_model import RANDOM_MODELS
from forebay.data.tiny_tasks import TINY_TASKS
from forebay.errors import UserError
from forebay.memory import built_in, engines, trainer
from forebay.memory.activations import layer_bytes
from forebay.memory.architecture import architecture_of, parse
from forebay.memory.fit import dry_run, verdict
from forebay.memory.items import GIB
from forebay.memory.known_models import KNOWN
from forebay.simulation.scenario import kv_tokens
from forebay.training import engine, lora, random_models, tiny_model, token_logprobs
from forebay.training.attention import PACKED, register

ROOT = Path(__file__).resolve().parents[2]
INDEX_BYTES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 269_030_016,
    "Qwen/Qwen2-7B-Instruct": 15_231_233_024,
    "Qwen/Qwen2.5-Math-7B": 15_231_233_024,
    "Qwen/Qwen2.5-VL-7B-Instruct": 16_584_333_312,
    "Qwen/Qwen3-4B": 8_044_936_192,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248,
    "Qwen/Qwen3-32B": 65_524_246_528,
}
"""`total_size` in the index of each model's weights on the hub: two bytes a parameter."""
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "llama with biases": {"model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", **TINY, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", **TINY, "head_dim": 32},
    "qwen3 with biases": {"model_type": "qwen3", **TINY, "head_dim": 16, "attention_bias": True},
    "qwen3_moe": {
        **TINY,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **TINY,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 48,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}


def build(values: dict[str, Any], *, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model that transformers makes of a config."""
    arguments = {name: value for name, value in values.items() if name != "model_type"}
    config = AutoConfig.for_model(values["model_type"], **arguments)
    kind: Any = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    with torch.device(device):
        return kind.from_config(config, dtype=dtype)


@pytest.mark.parametrize("name", list(TINY_CONFIGS))
def test_parameters_are_those_of_the_model(name: str) -> None:
    real = build(TINY_CONFIGS[name])
    assert parse(TINY_CONFIGS[name], name).parameters == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("name", list(KNOWN))
def test_known_models_are_those_of_the_hub(name: str) -> None:
    a = architecture_of(name)
    assert 2 * a.parameters == INDEX_BYTES[name]
    assert a.parameters == sum(p.numel() for p in build(KNOWN[name]).parameters())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen2_5_vl"])
def test_the_parts_add_up_to_layers_and_the_rest(name: str) -> None:
    real, a = build(TINY_CONFIGS[name]), parse(TINY_CONFIGS[name], name)
    layers = {n: p.numel() for n, p in real.named_parameters() if ".layers." in n or ".blocks." in n}
    assert a.outside_layers == a.parameters - sum(layers.values())
    each = [sum(size for n, size in layers.items() if f"layers.{i}." in n) for i in range(a.layers)]
    assert a.largest_layer == max(each)
    small = [n for n, p in real.named_parameters() if p.ndim == 1 and "visual" not in n and "bias" not in n]
    routers = [n for n in layers if n.endswith("mlp.gate.weight")]
    named = dict(real.named_parameters())
    assert a.replicated == sum(named[n].numel() for n in [*small, *routers])


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
@pytest.mark.parametrize("name", list(TINY_CONFIGS))
def test_adapters_are_counted(name: str, targets: list[str] | None) -> None:
    real = build(TINY_CONFIGS[name])
    lora.add_adapters(real, LoraConfig(rank=3, targets=targets), seed=0)
    found = parse(TINY_CONFIGS[name], name).adapter_parameters(3, targets)
    assert found == sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_a_saved_config_is_read_like_the_hubs(tmp_path: Path) -> None:
    """transformers nests the text part when it saves, and names things its own way."""
    real = build(TINY_CONFIGS["qwen2_5_vl"])
    real.config.save_pretrained(tmp_path)
    assert architecture_of(str(tmp_path)) == parse(TINY_CONFIGS["qwen2_5_vl"], "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "its sizes are not known here; give a folder with its config.json, or one of HuggingFaceTB"),
        ('{"model_type": "gpt2"}', "the parts of a gpt2 are not known here"),
        ('{"model_type": "qwen3"}', "lacks what the estimate needs"),
        ('{"model_type": "qwen3", "text_config": 3}', "lacks what the estimate needs .*3 is not a mapping"),
        ("not json", "cannot be read"),
        ("[]", "its config.json is a list, not a mapping"),
        ("null", "its config.json is a NoneType, not a mapping"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        architecture_of(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": "3"}, {"vocab_size": None}, {"hidden_size": -48}, {"vision_config": []}],
)
def test_sizes_that_no_model_has_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^model.path x: its config.json lacks what the estimate needs"):
        parse(TINY_CONFIGS["qwen2_5_vl"] | change, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_activations_are_about_what_torch_saves(name: str, dtype: torch.dtype) -> None:
    """A decoder's forward pass over one packed sequence; weights and what does not grow with the layers left out."""
    torch.manual_seed(0)
    values = TINY_CONFIGS[name] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "head_dim": 32,
    }
    values |= {"moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": []} if "moe" in name else {}
    tokens, saved = 512, []
    for layers in (2, 4):
        real = build(values | {"num_hidden_layers": layers}, device="cpu", dtype=dtype)
        register()
        real.set_attn_implementation(PACKED)
        weights = {p.untyped_storage().data_ptr() for p in real.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, weights: Any = weights, kept: Any = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        ends = torch.tensor([0, tokens], dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = real.model(
                input_ids=torch.arange(tokens)[None] % 300,
                position_ids=torch.arange(tokens)[None],
                use_cache=False,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=tokens,
                max_length_k=tokens,
            ).last_hidden_state
        saved.append(sum(kept.values()))
        del hidden
    each = (saved[1] - saved[0]) / 2 / tokens
    assert layer_bytes(parse(values, name), dtype.itemsize) == pytest.approx(each, rel=0.06)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_cache_is_vllms(tensor: int) -> None:
    config = profile(generation={"extra_args": ["--tensor-parallel-size", str(tensor)], "kv_cache": "8G"})
    a = architecture_of("Qwen/Qwen3-4B")
    spec = FullAttentionSpec(
        block_size=engines.BLOCK, num_kv_heads=a.kv_heads // tensor, head_size=a.head_dim, dtype=torch.bfloat16
    )
    blocks = (8 << 30) // (spec.page_size_bytes * a.layers)
    assert engines.kv_tokens(config, a) == blocks * engines.BLOCK
    assert kv_tokens(config, None) == pytest.approx(engines.kv_tokens(config, a), abs=engines.BLOCK * tensor)


def test_constants_are_those_of_the_code() -> None:
    assert trainer.RECOMPUTE_FROM == engine.RECOMPUTE_FROM
    assert trainer.TILES == 3 * 4 * token_logprobs.GPU_TILE


def test_tensor_parallel_ranks_share_matrices_and_repeat_the_rest() -> None:
    a = architecture_of("Qwen/Qwen3-30B-A3B")
    alone = engines.engine_weights(a, 2, 1, 1)
    assert alone == 2 * a.parameters
    four = engines.engine_weights(a, 2, 4, 1)
    assert four == pytest.approx(2 * ((a.parameters - a.replicated) / 4 + a.replicated))
    eight = engines.engine_weights(a, 2, 8, 1)
    # Four key-value heads on eight ranks: each is there twice, half a head a rank more than an equal part.
    more = 2 * a.layers * a.hidden * a.head_dim / 2
    assert eight == pytest.approx(2 * ((a.parameters - a.replicated) / 8 + a.replicated + more))
    assert engines.engine_weights(a, 2, 1, 2) > alone / 2


@pytest.mark.parametrize("arguments", [["-tp", "2", "-pp=3"], ["--pipeline_parallel_size", "3", "-tp=2"]])
def test_parallel_sizes_are_read_from_the_arguments(arguments: list[str]) -> None:
    assert engines.parallel_sizes(profile(generation={"extra_args": arguments})) == (2, 3)


@pytest.mark.parametrize("value", [["foo"], ["0"], ["-3"], ["2.0"], []])
@pytest.mark.parametrize("name", ["--tensor-parallel-size", "-tp", "--pipeline-parallel-size"])
def test_parallel_sizes_that_are_no_number_are_refused(name: str, value: list[str]) -> None:
    with pytest.raises(UserError, match=rf"^generation.extra_args: {name} is followed by .*; give the number of ranks"):
        engines.parallel_sizes(profile(generation={"extra_args": [name, *value]}))


def profile(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-4B", "dtype": "bfloat16", "max_model_len": 3072},
        "generation": {"max_new_tokens": 2048, "kv_cache": "16G"},
        "training": {"micro_batch_tokens": 16384},
        "hardware": {"device_memory_gib": 80},
    }
    for name, change in sections.items():
        values[name] = values.get(name, {}) | change
    return parse_config(values, "test")


def part(config: RunConfig, name: str) -> float:
    """GiB on each device of the trainer."""
    return next((item.device / GIB for item in trainer.trainer_memory(config).items if item.name == name), 0.0)


def test_stages_ranks_and_offloading_place_the_states() -> None:
    """Qwen3-4B: 4.02 G parameters, 7.49 GiB in bfloat16; by hand."""
    plain = profile(training={"ranks": 4, "zero_stage": 1})
    assert (part(plain, "weights"), part(plain, "optimizer")) == pytest.approx((7.49, 11.24), abs=0.01)
    assert part(profile(training={"ranks": 4, "zero_stage": 3}), "weights") == pytest.approx(7.49 / 4, abs=0.01)
    assert part(profile(training={"ranks": 4, "zero_stage": 3}), "gradients") == pytest.approx(3.75, abs=0.01)
    off = profile(training={"ranks": 4, "zero_stage": 2, "offload": "optimizer"})
    assert part(off, "optimizer") == part(off, "gradients") == 0
    host = {item.name: item.host / GIB for item in trainer.trainer_memory(off).items}
    assert host["optimizer"] == pytest.approx(44.95, abs=0.01)
    every = profile(training={"ranks": 4, "zero_stage": 3, "offload": "all"})
    assert part(every, "weights") == 0
    adapted = {"ranks": 4, "lora": {"rank": 16}}  # 33.0 M numbers in adapters
    for backend, weights in ({"zero_stage": 2}, 7.55), ({"zero_stage": 3}, 7.55 / 4), ({"backend": "fsdp2"}, 7.49 / 4):
        small = profile(training=adapted | backend, algorithm={"kl": "loss"})
        assert part(small, "weights") == pytest.approx(weights, abs=0.01)
        assert part(small, "optimizer") == pytest.approx(33.03e6 * 12 / 4 / GIB, rel=0.01)
        assert part(small, "gradients") == pytest.approx(33.03e6 * 4 / 4 / GIB, rel=0.01)
        assert part(small, "reference") == 0
    sharded = profile(training={"ranks": 4, "backend": "fsdp2"})
    assert (part(sharded, "gradients"), part(sharded, "optimizer")) == pytest.approx((3.75, 11.24), abs=0.01)


def test_a_frozen_vision_tower_has_no_gradients() -> None:
    values = {"path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    whole, frozen = (profile(model=values, training={"freeze_vision": f, "zero_stage": 2}) for f in (False, True))
    tower = 8_292_166_656 - 7_615_616_512
    assert part(whole, "optimizer") - part(frozen, "optimizer") == pytest.approx(12 * tower / GIB)
    assert part(whole, "weights") == part(frozen, "weights")


def test_a_critic_is_trained_like_the_policy_without_its_head() -> None:
    config = profile(
        model={"path": "Qwen/Qwen2-7B"}, training={"zero_stage": 3, "ranks": 4}, algorithm={"advantage": "gae"}
    )
    size = 7_615_616_512 - 152_064 * 3584 + 3584 + 1
    assert part(config, "critic optimizer") == pytest.approx(12 * size / 4 / GIB)
    assert part(config, "critic weights") == pytest.approx(2 * size / 4 / GIB)


def test_a_critic_under_lora_trains_adapters_and_its_head() -> None:
    values = {"model": {"path": "Qwen/Qwen2-7B"}, "algorithm": {"advantage": "gae"}}
    config = profile(training={"zero_stage": 3, "ranks": 4, "lora": {"rank": 8}}, **values)
    assert part(config, "critic optimizer") == pytest.approx(part(config, "optimizer") + 12 * 3585 / 4 / GIB)
    full = profile(training={"zero_stage": 3, "ranks": 4}, **values)
    assert part(config, "critic weights") > part(full, "critic weights")


def test_what_fits_has_no_problem_and_what_does_not_says_what_would() -> None:
    assert dry_run(profile(training={"ranks": 2, "zero_stage": 2})).problems == ()
    (problem,) = dry_run(
        profile(model={"path": "Qwen/Qwen3-32B"}, training={"ranks": 8}, hardware={"reserve_gib": 2})
    ).problems[:1]
    assert problem.startswith("the trainer does not fit: ")
    advice = re.findall(r"((?:training\.\w+=\w+(?: and )?)+)", problem)
    assert len(advice) == 3
    for settings in advice:
        changes = [
            text.removeprefix("training.").partition("=") for text in settings.removesuffix(" and ").split(" and ")
        ]
        values = {key: yaml.safe_load(value) for key, _, value in changes}
        changed = profile(model={"path": "Qwen/Qwen3-32B"}, training={"ranks": 8} | values, hardware={"reserve_gib": 2})
        assert not [text for text in dry_run(changed).problems if "trainer" in text]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"hardware": {"devices": 1}}, "need 2 devices, hardware.devices is 1"),
        ({"generation": {"kv_cache": "256M"}}, "holds 1,808 tokens, less than one sequence of model.max_model_len"),
        ({"generation": {"kv_cache": "79G"}}, "what fits: generation.kv_cache=6.G"),
        (
            {"training": {"ranks": 4}, "hardware": {"host_memory_gib": 8}},
            "GiB on a host of 8.0 GiB, most of it checkpoint",
        ),
    ],
)
def test_each_thing_that_does_not_fit_is_named(sections: dict[str, Any], message: str) -> None:
    config = profile(
        training={"zero_stage": 2, "offload": "none", "ranks": 1} | sections.pop("training", {}), **sections
    )
    assert any(re.search(message, problem) for problem in dry_run(config).problems)


@pytest.mark.parametrize(
    ("host", "engines_there", "advice"),
    [(8, 4, "generation.engines=1"), (1, 2, "devices with hardware.host_memory_gib=15, or a smaller model")],
)
def test_a_cache_does_not_help_a_small_host(host: int, engines_there: int, advice: str) -> None:
    """Each engine stages 7.49 GiB of weights there."""
    config = profile(
        generation={"engines": engines_there}, hardware={"host_memory_gib": host}, training={"zero_stage": 2}
    )
    (problem,) = (text for text in dry_run(config).problems if "engines" in text)
    assert problem.endswith(f"; what fits: {advice}")


def test_a_cache_that_is_advised_is_smaller_than_the_profiles() -> None:
    """Where device and host are both too small, a smaller cache alone is no advice."""
    tight = {"hardware": {"host_memory_gib": 10}, "generation": {"kv_cache": "79G", "engines": 2}}
    (problem,) = (text for text in dry_run(profile(**tight)).problems if "engines" in text)
    assert problem.endswith(
        "what fits: devices with hardware.device_memory_gib=92 and hardware.host_memory_gib=15, or a smaller model"
    )


def test_a_reserve_leaves_room() -> None:
    with pytest.raises(
        UserError, match=r"hardware.reserve_gib \(4\) leaves nothing of hardware.device_memory_gib \(4\)"
    ):
        profile(hardware={"device_memory_gib": 4})
    assert profile(hardware={"device_memory_gib": 4.5}).hardware.reserve_gib == 4


PROFILES = [
    "qwen2_5_math_7b_dapo",
    "qwen2_5_vl_7b_geo3k",
    "qwen2_7b_ppo",
    "qwen3_30b_a3b_asp",
    "qwen3_32b_asp",
    "qwen3_4b_grpo",
    "telecom_retrain",
]


@pytest.mark.parametrize("name", ["quickstart_cpu", "maze_cpu", "telecom_cpu"])
def test_the_tiny_models_are_estimated_as_they_are_made(name: str, tmp_path: Path) -> None:
    config = load_profile(ROOT / "profiles" / f"{name}.yaml")
    words = TINY_TASKS[config.model.path].words(config.data)
    model = tiny_model.TinyQwen3(len(tiny_model.SPECIALS) + len(words), 0)
    tiny_model.save_model(model, tiny_model.make_tokenizer(words), tmp_path)
    a = built_in.model_of(config)
    assert a == architecture_of(str(tmp_path))
    assert a.parameters == sum(p.numel() for p in model.parameters())
    assert tiny_model.MAX_POSITIONS == built_in.TINY_POSITIONS


@pytest.mark.parametrize("name", list(random_models.ARCHITECTURES))
def test_the_random_models_are_estimated_as_they_are_made(name: str, tmp_path: Path) -> None:
    random_models.save_random_model(name, 0, tmp_path)
    path = f"builtin:random-{name}"
    assert set(built_in.RANDOM) == set(RANDOM_MODELS)
    assert built_in.model_of(
        profile(model={"path": path, "max_model_len": 2048}, generation={"max_new_tokens": 8})
    ) == architecture_of(str(tmp_path))
    room = json.loads((tmp_path / "config.json").read_text())
    assert room.get("text_config", room)["max_position_embeddings"] == built_in.RANDOM_POSITIONS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.path": "builtin:maze-large"},
            "model.path builtin:maze-large: the built-in models are builtin:maze-tiny, ",
        ),
        ({"data.source": "builtin:cycle"}, "model.path builtin:maze-tiny reads only data.source builtin:maze"),
        (
            {"model.max_model_len": 1024},
            r"model.max_model_len \(1024\): model.path builtin:maze-tiny has only 512 positions",
        ),
    ],
)
def test_built_in_models_that_a_run_would_refuse_are_refused(changes: dict[str, Any], message: str) -> None:
    config = load_profile(ROOT / "profiles" / "quickstart_cpu.yaml", [f"{k}={v}" for k, v in changes.items()])
    with pytest.raises(UserError, match=message):
        dry_run(config)


def test_a_profile_for_cpus_is_held_against_the_hosts_memory() -> None:
    def quickstart(*changes: str) -> RunConfig:
        return load_profile(ROOT / "profiles" / "quickstart_cpu.yaml", changes)

    here = quickstart()
    found = dry_run(here)
    assert found.problems == ()
    assert "GiB of CPU memory that they share" in verdict(here, found)
    assert "(assumed: a run on CPUs and on this machine, since" in verdict(here, found)
    needed = sum(fleet.devices * fleet.device + fleet.host for fleet in found.fleets) / GIB
    for there, problems in (1.01 * needed, 0), (0.99 * needed, 1):
        host = quickstart(f"hardware.host_memory_gib={there}")
        assert len(dry_run(host).problems) == problems
    assert "(assumed: a run on CPUs, since" in verdict(host, found)
    (problem,) = dry_run(host).problems
    assert problem.startswith("trainer and engines do not fit: ")
    device = quickstart("hardware.device_memory_gib=80")
    assert verdict(device, dry_run(device)).startswith("fits: trainer ")


@pytest.mark.parametrize("name", PROFILES)
def test_the_sources_profiles_fit_their_devices(name: str) -> None:
    config = load_profile(ROOT / "profiles" / f"{name}.yaml")
    assert config.name == name
    assert dry_run(config).problems == ()


def test_the_command_prints_the_parts_and_refuses_what_cannot_fit(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    values = profile(training={"ranks": 2, "zero_stage": 2}).model_dump(mode="json")
    file.write_text(json.dumps(values))
    fine = CliRunner().invoke(app, ["plan", str(file), "--dry-run"])
    assert fine.exit_code == 0, fine.output
    for word in ("weights", "gradients", "optimizer", "activations", "KV cache", "together", "fits: trainer"):
        assert word in fine.output
    arguments = ["plan", str(file), "--dry-run", "--set", "hardware.device_memory_gib=24"]
    small = CliRunner().invoke(app, arguments)
    assert small.exit_code == 2
    assert re.search(r"^forebay: the trainer does not fit: .*what fits: training\.", small.stderr, re.MULTILINE)
    unknown = CliRunner().invoke(app, ["plan", str(file), "--dry-run", "--set", "hardware.device_memory_gib=null"])
    assert (unknown.exit_code, "nothing to compare with" in unknown.output) == (0, True)
    assert CliRunner().invoke(app, ["plan", str(file)]).exit_code == 2
    for option, value in ("--devices", "4"), ("--html", str(tmp_path / "x.html")), ("--calibrate", "run"):
        refused = CliRunner().invoke(app, ["plan", str(file), "--dry-run", option, value])
        assert refused.exit_code == 2
        assert refused.stderr == f"forebay: plan --dry-run simulates nothing: leave out {option}, or --dry-run\n"
