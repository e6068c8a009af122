"""LoRA and a mixture of experts on every backend, two ranks, against plain torch loops over unpacked sequences.

The loop for LoRA knows no peft: it computes with W + scale x B A written out. All cases run in the same two processes.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from forebay.adapters import DOWN, UP
from forebay.config import LoraConfig
from forebay.training import lora
from forebay.training.random_models import save_random_model
from tests.support.tiny_lm import make_start_model

WORLD, STEPS, RESUME_AT, VOCABULARY = 2, 3, 2, 100
RATE, DECAY, CLIP, TEMPERATURE, KL, BALANCE = 5e-3, 0.1, 0.5, 0.8, 0.3, 0.4
LORA = {"rank": 4, "alpha": 6.0}
SCALE = 1.5
SEED = 7

BACKENDS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "fsdp2": {"backend": "fsdp2"},
    "zero3 all": {"zero_stage": 3, "offload": "all"},
    "fsdp2 all": {"backend": "fsdp2", "offload": "all"},
    "zero3 recomputed": {"zero_stage": 3, "activation_checkpointing": True},
    "fsdp2 recomputed": {"backend": "fsdp2", "activation_checkpointing": True},
}
MOE = ["zero1", "zero2", "zero3", "fsdp2", "zero3 recomputed", "fsdp2 recomputed"]
RESUMED = ["zero1", "zero3", "fsdp2"]
BF16 = ["zero2", "zero3", "fsdp2"]

Batch = list[dict[str, Any]]


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    make_start_model(folder / "runs" / "dense" / "start_model")
    (folder / "runs" / "moe" / "start_model").mkdir(parents=True)
    save_random_model("qwen3_moe", 0, folder / "runs" / "moe" / "start_model")
    return folder


@pytest.fixture(scope="module")
def steps() -> list[Batch]:
    """In the second step there are fewer sequences than ranks."""
    rng = random.Random(2)

    def sample(longest: int) -> dict[str, Any]:
        ids = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(2, longest) if longest else 0)]
        behaviour = [rng.gauss(-4.6, 0.3) for _ in ids]
        return {"ids": ids, "logprobs": behaviour, "reward": rng.random(), "oldest_version": 0}

    def group(number: int, lengths: list[int]) -> dict[str, Any]:
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(3, 12))]
        samples = [sample(longest) for longest in lengths]
        return {"group_id": number, "prompt_ids": prompt, "staleness": 0, "samples": samples}

    return [[group(0, [24] * 4), group(1, [24] * 3)], [group(2, [24, 0])], [group(3, [24] * 4), group(4, [24] * 3)]]


def response_logprobs(logits: torch.Tensor, prompt: list[int], ids: list[int]) -> torch.Tensor:
    logits = logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def plain_loop(
    steps: list[Batch],
    named: dict[str, torch.Tensor],
    losses_of: Callable[[list[int], list[int]], tuple[torch.Tensor, torch.Tensor]],
) -> Trace:
    """`losses_of(prompt, ids)`: log-probabilities of the response, and each token's loss beside the policy loss."""
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=(0.9, 0.95))
    trace = Trace()
    for step in steps:
        loss, tokens = torch.zeros(()), 0
        for group in step:
            rewards = torch.tensor([s["reward"] for s in group["samples"]], dtype=torch.float64)
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
            for sample, advantage in zip(group["samples"], advantages, strict=True):
                if sample["ids"]:
                    logprobs, more = losses_of(group["prompt_ids"], sample["ids"])
                    ratio = (logprobs - torch.tensor(sample["logprobs"])).exp()
                    plain, clipped = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
                    loss = loss + (more - torch.minimum(plain, clipped)).sum()
                    tokens += len(sample["ids"])
        optimizer.zero_grad()
        (loss / tokens).backward()
        trace.losses.append(float(loss.detach()) / tokens)
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        optimizer.step()
    return trace


@pytest.fixture(scope="module")
def moe(scratch: Path, steps: list[Batch]) -> Trace:
    folder = scratch / "runs" / "moe" / "start_model"
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")

    def losses_of(prompt: list[int], ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = lm(torch.tensor([[*prompt, *ids]]), use_cache=False, output_router_logits=True)
        layers = [load_balancing_loss_func((layer,), 8, 2) for layer in out.router_logits]
        logprobs = response_logprobs(out.logits, prompt, ids)
        return logprobs, BALANCE * torch.stack(layers).mean().expand_as(logprobs)

    trace = plain_loop(steps, dict(lm.named_parameters()), losses_of)
    lm.save_pretrained(scratch / "moe trained")
    trace.weights = load_file(scratch / "moe trained" / "model.safetensors")
    return trace


@dataclass
class Lora(Trace):
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    pairs: dict[str, torch.Tensor] = field(default_factory=dict)
    """Named as an adapter's snapshot names them."""


@pytest.fixture(scope="module")
def dense(scratch: Path, steps: list[Batch]) -> Lora:
    folder = scratch / "runs" / "dense" / "start_model"
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    base = {name: p.detach() for name, p in lm.named_parameters()}
    template = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora.add_adapters(template, LoraConfig(**LORA), SEED)  # type: ignore[arg-type]
    pairs = {}
    for adapter in lora.adapters(template):
        module = adapter.weight.removesuffix(".weight")
        pairs |= {
            module + DOWN: adapter.down.detach().requires_grad_(),
            module + UP: adapter.up.detach().requires_grad_(),
        }

    def merged() -> dict[str, torch.Tensor]:
        modules = [name.removesuffix(DOWN) for name in pairs if name.endswith(DOWN)]
        return base | {f"{m}.weight": base[f"{m}.weight"] + SCALE * pairs[m + UP] @ pairs[m + DOWN] for m in modules}

    def losses_of(prompt: list[int], ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs: Any = {"input_ids": torch.tensor([[*prompt, *ids]]), "use_cache": False}
        logits = [functional_call(lm, weights, (), inputs, tie_weights=True).logits for weights in (merged(), base)]
        own, far = (response_logprobs(each, prompt, ids) for each in logits)
        return own, KL * ((far - own).exp() - 1 - (far - own))

    trace = plain_loop(steps, pairs, losses_of)
    with torch.no_grad():
        weights = merged()
    return Lora(trace.losses, trace.norms, weights, base, {name: p.detach() for name, p in pairs.items()})


def case(architecture: str, name: str, dtype: str = "float32", resume_at: int | None = None) -> dict[str, Any]:
    training = {
        "ranks": WORLD,
        "steps": STEPS,
        "learning_rate": RATE,
        "warmup_steps": 0,
        "weight_decay": DECAY,
        "grad_clip": CLIP,
        "micro_batch_tokens": 64,
    }
    config: dict[str, Any] = {
        "seed": SEED,
        "model": {"max_model_len": 64, "dtype": dtype},
        "generation": {"max_new_tokens": 32, "temperature": TEMPERATURE},
        "training": training | BACKENDS[name],
        "algorithm": {"router_aux_loss": BALANCE, "mismatch_alarm": 99.0},
    }
    if architecture == "dense":
        config["training"]["lora"] = LORA | {"publish": "adapter"}
        config["algorithm"] = {"kl": "loss", "kl_coefficient": KL, "mismatch_alarm": 99.0}
    return {
        "config": config,
        "run_id": architecture,
        "batches": "batches",
        "resume_at": resume_at,
        "persistent": 0,
        "shard_bytes": 40_000,
    }


@pytest.fixture(scope="module")
def out(scratch: Path, steps: list[Batch]) -> Path:
    """What the ranks wrote."""
    cases = {f"moe {name}": case("moe", name) for name in MOE}
    cases |= {f"dense {name}": case("dense", name) for name in BACKENDS}
    cases |= {f"dense {name} resumed": case("dense", name, resume_at=RESUME_AT) for name in RESUMED}
    cases |= {f"dense {name} bf16": case("dense", name, "bfloat16") for name in BF16}
    folder = scratch / "out"
    folder.mkdir()
    bodies = [
        [msgpack.packb({"step": step, "version": 0, "groups": groups, "complete": True}).hex()]
        for step, groups in enumerate(steps, 1)
    ]
    job = {"scratch": str(scratch), "run_id": "", "out": str(folder), "batches": bodies, "cases": cases}
    path = scratch / "job.json"
    path.write_text(json.dumps(job | {"probe": [[3, 4], [5, 6]]}))
    ranks = [_rank(path, scratch, rank) for rank in range(WORLD)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    return folder


def _rank(job: Path, scratch: Path, rank: int) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "FOREBAY_RENDEZVOUS": str(scratch / "meet"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "tests.support.backend_traces", str(job)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def read(out: Path, name: str) -> Trace:
    metrics = json.loads((out / f"{name}.0.json").read_text())["metrics"]
    losses, norms = ([m[key] for m in metrics] for key in ("loss", "grad_norm"))
    return Trace(losses, norms, load_file(out / f"{name}.safetensors"))


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("name", MOE)
def test_a_mixture_of_experts_trains_as_in_a_plain_loop(out: Path, moe: Trace, name: str) -> None:
    """With the routers' loss; what is published is named as in transformers' files: an expert, a tensor."""
    trace = read(out, f"moe {name}")
    assert trace.losses == pytest.approx(moe.losses, abs=1e-5)
    assert trace.norms == pytest.approx(moe.norms, rel=1e-4)
    assert gap(trace.weights, moe.weights) < 1e-4
    assert sum(".mlp.experts." in name for name in trace.weights) == 2 * 8 * 3


@pytest.mark.parametrize("name", list(BACKENDS))
def test_adapters_train_as_in_a_plain_loop(out: Path, dense: Lora, name: str) -> None:
    trace = read(out, f"dense {name}")
    assert trace.losses == pytest.approx(dense.losses, abs=1e-5)
    assert trace.norms == pytest.approx(dense.norms, rel=1e-4)
    assert gap(trace.weights, dense.weights) < 1e-4
    assert gap(load_file(out / f"dense {name}.snapshot.safetensors"), dense.pairs) < 1e-4
    fixed = [key for key in dense.base if key.removesuffix(".weight") + DOWN not in dense.pairs]
    assert all(torch.equal(trace.weights[key], dense.base[key]) for key in fixed)
    assert gap(trace.weights, dense.base) > 0.01
    masters = [json.loads((out / f"dense {name}.{rank}.json").read_text())["masters"] for rank in range(WORLD)]
    trained = sum(p.numel() for p in dense.pairs.values())
    assert sum(masters) in range(trained, trained + 200) or set(masters) == {trained}


@pytest.mark.parametrize("name", RESUMED)
def test_adapters_go_on_from_a_checkpoint_bit_by_bit(out: Path, name: str) -> None:
    calm, resumed = read(out, f"dense {name}"), read(out, f"dense {name} resumed")
    assert (resumed.losses, resumed.norms) == (calm.losses, calm.norms)
    assert all(torch.equal(resumed.weights[key], calm.weights[key]) for key in calm.weights)


@pytest.mark.parametrize("name", BF16)
def test_adapters_in_bfloat16_are_near(out: Path, dense: Lora, name: str) -> None:
    trace = read(out, f"dense {name} bf16")
    assert {tensor.dtype for tensor in trace.weights.values()} == {torch.bfloat16}
    assert trace.losses == pytest.approx(dense.losses, abs=0.03)
    pairs = load_file(out / f"dense {name} bf16.snapshot.safetensors")
    assert gap(pairs, dense.pairs) < 0.02
