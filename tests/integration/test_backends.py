"""One learner, two backends: DeepSpeed ZeRO 0 to 3 and FSDP2, with and without offloading, on 1, 2 and 3 ranks.

The golden is a loop in plain torch over unpadded, unpacked sequences, with the loss and the learning rate written out.
All cases of a number of ranks run in the same processes, one after another.
"""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forebay.config import parse_config
from forebay.memory.architecture import architecture_of
from forebay.memory.trainer import trainer_memory
from tests.integration import test_trainer
from tests.support import ppo_reference
from tests.support.control_stub import ControlStub
from tests.support.tiny_lm import VOCABULARY, make_start_model

DEADLINE_S = 480
LEARNING_RATE, WARMUP, MINIMUM, WEIGHT_DECAY, CLIP, TEMPERATURE = 2e-3, 2, 0.1, 0.1, 0.5, 0.8
SHARD_BYTES = 30_000
LONE_STEP, EMPTY_STEP, STEPS, RESUME_AT = 2, 4, 6, 3

DEEPSPEED = {f"zero{stage}": {"zero_stage": stage} for stage in range(4)}
SHARDED: dict[str, dict[str, Any]] = {**DEEPSPEED, "fsdp2": {"backend": "fsdp2"}}
OFFLOADED: dict[str, dict[str, Any]] = {
    "zero1 optimizer": {"zero_stage": 1, "offload": "optimizer"},
    "zero2 optimizer": {"zero_stage": 2, "offload": "optimizer"},
    "zero3 optimizer": {"zero_stage": 3, "offload": "optimizer"},
    "zero3 all": {"zero_stage": 3, "offload": "all"},
    "fsdp2 all": {"backend": "fsdp2", "offload": "all"},
}
CASES = {**SHARDED, **OFFLOADED}
WORLDS = {1: [*SHARDED, "zero3 all", "fsdp2 all"], 2: list(CASES), 3: ["zero1", "zero3", "fsdp2"]}
RESUMED = {1: ["zero0", "zero1", "fsdp2"], 2: list(CASES), 3: []}
ALL = [(world, name) for world, names in WORLDS.items() for name in names]
BF16 = {"bf16 zero0": DEEPSPEED["zero0"], "bf16 zero3": DEEPSPEED["zero3"], "bf16 fsdp2": SHARDED["fsdp2"]}
MEASURED = ["zero1", "zero2", "zero3", "fsdp2", "zero2 optimizer", "bf16 zero0", "bf16 zero3"]

PPO = ppo_reference.Settings(
    temperature=TEMPERATURE,
    gamma=0.99,
    lam=0.9,
    clip_low=0.2,
    clip_high=0.28,
    value_clip=0.1,
    updates=2,
    parts=2,
    alone=1,
    seed=0,
)
CRITIC_RATE = 5e-3
PPO_CASES: dict[str, dict[str, Any]] = {
    **{f"ppo {name}": SHARDED[name] for name in ("zero1", "zero3", "fsdp2")},
    "ppo large micro-batches": {"zero_stage": 1, "micro_batch_tokens": 300},
}
PPO_WORLDS = {1: ["ppo zero1", "ppo large micro-batches"], 2: ["ppo zero1", "ppo zero3", "ppo fsdp2"], 3: ["ppo zero1"]}
PPO_LORA = {f"ppo lora {name}": {**SHARDED[name], "lora": {"rank": 4}} for name in ("zero1", "zero3", "fsdp2")}
PPO_LORA_WORLDS = {1: ["ppo lora zero1"], 2: ["ppo lora zero3", "ppo lora fsdp2"], 3: []}
PPO_RESUMED = ["ppo zero3", "ppo fsdp2"]


@dataclass(frozen=True)
class Batches:
    """`steps[i]`: the groups of step i + 1. Streamed in two chunks each, and a last one without groups; or whole."""

    steps: list[list[dict[str, Any]]]
    probe: tuple[list[int], list[int]]

    def bodies(self, whole: bool = False) -> list[list[str]]:
        chunks = []
        for step, groups in enumerate(self.steps, 1):
            parts = [groups] if whole else [groups[:2], groups[2:], []]
            messages = [{"step": step, "version": 0, "groups": part, "complete": False} for part in parts]
            messages[-1]["complete"] = True
            chunks.append([msgpack.packb(message).hex() for message in messages])
        return chunks


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    norms: list[float]
    rates: list[float]
    evaluated: list[list[float]]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    (folder / "runs" / "run").mkdir(parents=True)
    make_start_model(folder / "runs" / "run" / "start_model")
    return folder


@pytest.fixture(scope="module")
def batches() -> Batches:
    """Random responses, behaviour near uniform, so that some ratios are clipped. One step has a single sequence, fewer
    than ranks; one has none."""
    rng = random.Random(11)

    def sample(longest: int = 30) -> dict[str, Any]:
        ids = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(2, longest) if longest else 0)]
        return {
            "ids": ids,
            "logprobs": [rng.gauss(-4.6, 0.3) for _ in ids],
            "reward": rng.random(),
            "oldest_version": 0,
        }

    def group(number: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(3, 20))]
        return {"group_id": number, "prompt_ids": prompt, "staleness": 0, "samples": samples}

    steps = [[group(10 * step + i, [sample() for _ in range(4)]) for i in range(3)] for step in range(STEPS)]
    steps[LONE_STEP - 1] = [group(1, [sample(), sample(longest=0)])]
    steps[EMPTY_STEP - 1] = []
    return Batches(steps, ([3, 4, 5], [6, 7, 8, 9]))


def response_logprobs(lm: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    logits = lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture(scope="module")
def golden(scratch: Path, batches: Batches) -> Trace:
    lm = AutoModelForCausalLM.from_pretrained(scratch / "runs" / "run" / "start_model", dtype=torch.float32)
    named = dict(lm.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    trace = Trace([], [], [], [], {})
    for step in batches.steps:
        with torch.no_grad():
            trace.evaluated.append(response_logprobs(lm, *batches.probe).tolist())
        loss, tokens = torch.zeros(()), 0
        for group in step:
            rewards = torch.tensor([s["reward"] for s in group["samples"]], dtype=torch.float64)
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
            for sample, advantage in zip(group["samples"], advantages, strict=True):
                if sample["ids"]:
                    logprobs = response_logprobs(lm, group["prompt_ids"], sample["ids"])
                    ratio = (logprobs - torch.tensor(sample["logprobs"])).exp()
                    plain, clipped = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
                    loss = loss - torch.where(plain < clipped, plain, clipped).sum()
                    tokens += len(sample["ids"])
        if not tokens:
            continue
        optimizer.zero_grad()
        (loss / tokens).backward()
        done = len(trace.losses)
        cosine = (1 + math.cos(math.pi * (done - WARMUP) / (STEPS - WARMUP))) / 2
        rate = LEARNING_RATE * ((done + 1) / WARMUP if done < WARMUP else MINIMUM + (1 - MINIMUM) * cosine)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        trace.losses.append(float(loss.detach()) / tokens)
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        trace.rates.append(rate)
        optimizer.step()
    trace.weights.update({name: p.detach() for name, p in named.items()})
    return trace


class Runs:
    """What the ranks wrote, for each number of ranks; each is started when it is first asked for."""

    def __init__(self, scratch: Path, batches: Batches) -> None:
        self._scratch, self._batches = scratch, batches
        self._done: dict[int, Path] = {}

    def result(self, world: int, name: str, rank: int = 0) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self._folder(world) / f"{name}.{rank}.json").read_text())
        return result

    def trace(self, world: int, name: str) -> Trace:
        result = self.result(world, name)
        metrics = [m for m in result["metrics"] if m["tokens"]]
        losses, norms, rates = ([m[key] for m in metrics] for key in ("loss", "grad_norm", "learning_rate"))
        weights = load_file(self._folder(world) / f"{name}.safetensors")
        return Trace(losses, norms, rates, result["evaluated"], weights)

    def _folder(self, world: int) -> Path:
        if world not in self._done:
            self._done[world] = self._scratch / f"out-{world}"
            self._done[world].mkdir()
            self._start(world)
        return self._done[world]

    def _start(self, world: int) -> None:
        cases = {}
        for name in WORLDS[world]:
            cases[name] = self.case(world, "float32", CASES[name], None)
        for name in RESUMED[world]:
            cases[f"{name} resumed"] = self.case(world, "float32", CASES[name], RESUME_AT)
        if world == 2:
            cases |= {name: self.case(world, "bfloat16", options, None) for name, options in BF16.items()}
            for name in MEASURED:
                cases[name]["measured"] = True
            cases |= {f"{n} resumed": self.case(world, "bfloat16", o, RESUME_AT) for n, o in BF16.items()}
        for name in PPO_WORLDS[world] + PPO_LORA_WORLDS[world]:
            options = {**PPO_CASES, **PPO_LORA}[name]
            cases[name] = self._ppo(world, options, None)
            if world == 2 and name in PPO_RESUMED:
                cases[f"{name} resumed"] = self._ppo(world, options, RESUME_AT)
        job = {
            "scratch": str(self._scratch),
            "run_id": "run",
            "out": str(self._done[world]),
            "batches": self._batches.bodies(),
            "whole": self._batches.bodies(whole=True),
            "probe": self._batches.probe,
            "cases": cases,
        }
        path = self._scratch / f"job-{world}.json"
        path.write_text(json.dumps(job))
        ranks = [self._rank(path, world, rank) for rank in range(world)]
        try:
            for process in ranks:
                _, errors = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0, errors
        finally:
            for process in ranks:
                process.kill()

    def case(self, world: int, dtype: str, options: dict[str, Any], resume_at: int | None) -> dict[str, Any]:
        training = {
            "ranks": world,
            "steps": STEPS,
            "learning_rate": LEARNING_RATE,
            "learning_rate_schedule": "cosine",
            "min_learning_rate_ratio": MINIMUM,
            "warmup_steps": WARMUP,
            "weight_decay": WEIGHT_DECAY,
            "grad_clip": CLIP,
            "micro_batch_tokens": 64,
        }
        config = {
            "model": {"max_model_len": 64, "dtype": dtype},
            "generation": {"max_new_tokens": 32, "temperature": TEMPERATURE},
            "training": training | options,
        }
        case = {"config": config, "batches": "batches", "resume_at": resume_at, "persistent": 0}
        return case | {"shard_bytes": SHARD_BYTES, "measured": False}

    def _ppo(self, world: int, options: dict[str, Any], resume_at: int | None) -> dict[str, Any]:
        updates = {"updates_per_batch": PPO.updates, "mini_batches": PPO.parts}
        case = self.case(world, "float32", options | updates, resume_at) | {"batches": "whole"}
        case["config"]["algorithm"] = {
            "advantage": "gae",
            "gamma": PPO.gamma,
            "gae_lambda": PPO.lam,
            "correction": "decoupled",
        }
        case["config"]["critic"] = {"learning_rate": CRITIC_RATE, "warmup_steps": PPO.alone, "clip": PPO.value_clip}
        return case

    def _rank(self, job: Path, world: int, rank: int) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "FOREBAY_RENDEZVOUS": str(self._scratch / f"meet-{world}"),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.support.backend_traces", str(job)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def runs(scratch: Path, batches: Batches) -> Runs:
    return Runs(scratch, batches)


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize(("world", "name"), ALL)
def test_the_trace_equals_a_plain_torch_loop(runs: Runs, golden: Trace, world: int, name: str) -> None:
    trace = runs.trace(world, name)
    assert trace.losses == pytest.approx(golden.losses, abs=1e-5)
    assert trace.norms == pytest.approx(golden.norms, rel=1e-5)
    assert trace.rates == pytest.approx(golden.rates, rel=1e-9)
    assert gap(trace.weights, golden.weights) < 1e-5
    assert min(golden.norms) > CLIP
    assert runs.result(world, name)["metrics"][EMPTY_STEP - 1] == {"tokens": 0.0}


@pytest.mark.parametrize(("world", "name"), ALL)
def test_evaluation_in_the_middle_of_a_step_is_that_of_the_step_before(
    runs: Runs, golden: Trace, world: int, name: str
) -> None:
    for rank in range(world):
        evaluated = runs.result(world, name, rank)["evaluated"]
        assert torch.tensor(evaluated) == pytest.approx(torch.tensor(golden.evaluated), abs=1e-5)


@pytest.mark.parametrize(
    ("world", "name"), [(w, name) for w, names in {**RESUMED, 2: [*CASES, *BF16]}.items() for name in names]
)
def test_a_resumed_run_is_the_same_bit_by_bit(runs: Runs, world: int, name: str) -> None:
    calm, resumed = runs.trace(world, name), runs.trace(world, f"{name} resumed")
    assert (resumed.losses, resumed.norms, resumed.rates) == (calm.losses, calm.norms, calm.rates)
    assert resumed.evaluated == calm.evaluated
    assert all(torch.equal(resumed.weights[name], calm.weights[name]) for name in calm.weights)


@pytest.mark.parametrize("name", list(BF16))
def test_bfloat16_is_near_float32_on_every_backend(runs: Runs, golden: Trace, name: str) -> None:
    """Also at stage 0, which DeepSpeed by itself would train in bfloat16 alone."""
    trace = runs.trace(2, name)
    assert {tensor.dtype for tensor in trace.weights.values()} == {torch.bfloat16}
    assert trace.losses == pytest.approx(golden.losses, abs=0.02)
    assert trace.norms == pytest.approx(golden.norms, rel=0.05)
    assert gap(trace.weights, golden.weights) < 0.02


@pytest.mark.parametrize(("world", "name"), ALL)
def test_only_rank_0_gets_shards_and_no_shard_is_larger_than_a_bucket(runs: Runs, world: int, name: str) -> None:
    sizes = runs.result(world, name)["shard_bytes"]
    assert len(sizes) > 2
    assert max(sizes) <= SHARD_BYTES
    for rank in range(1, world):
        assert runs.result(world, name, rank)["shard_bytes"] == [0] * len(sizes)


@pytest.mark.parametrize("name", ["zero3", "zero3 all", "fsdp2", "fsdp2 all"])
def test_no_rank_holds_more_than_a_bucket_beyond_its_own_part(runs: Runs, golden: Trace, name: str) -> None:
    """While a snapshot is gathered. A rank gathers one parameter at a time, perhaps before it lets go of the last one;
    rank 0 has the copies in CPU memory besides: a bucket of them, and here the one before."""
    sizes = [tensor.nbytes for tensor in golden.weights.values()]
    first, other = (runs.result(2, name, rank)["most_held"] for rank in range(2))
    assert max(sizes) <= other < SHARD_BYTES
    assert first <= 2 * SHARD_BYTES + other < sum(sizes)


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_the_states_is_what_is_there(runs: Runs, scratch: Path, name: str) -> None:
    """Weights, gradients and optimizer of each of two ranks, before an update. Under ZeRO-3 so small a model is there
    whole besides, and what DeepSpeed offloads passes through buffers of the size of a parameter."""
    dtype = "bfloat16" if name in BF16 else "float32"
    values = runs.case(2, dtype, {**CASES, **BF16}[name], None)["config"] | {"hardware": {"devices_per_host": 1}}
    config, a = parse_config(values, name), architecture_of(str(scratch / "runs" / "run" / "start_model"))
    parts = ("weights", "gradients", "optimizer")
    expected = sum(i.device + i.host for i in trainer_memory(config, a).items if i.name in parts)
    if "zero3" in name:
        expected += a.parameters * (2 if dtype == "bfloat16" else 4)
    for rank in range(2):
        assert runs.result(2, name, rank)["states"] == pytest.approx(expected, rel=0.1)


def test_a_rank_builds_the_model_without_ever_holding_it(runs: Runs, golden: Trace) -> None:
    """ZeRO-3: one parameter at a time. FSDP2: one layer, or what is outside of the layers."""
    sizes = {name: tensor.numel() for name, tensor in golden.weights.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    rest = sum(size for name, size in sizes.items() if not name.startswith("model.layers."))
    for rank in range(2):
        assert runs.result(2, "zero3", rank)["most_allocated"] == max(sizes.values())
        assert runs.result(2, "fsdp2", rank)["most_allocated"] == max(layer, rest)
        assert runs.result(2, "zero1", rank)["most_allocated"] == sum(sizes.values())


def test_fsdp2_trains_as_a_process_of_the_run_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = test_trainer.make_run(tmp_path, ranks=2, backend="fsdp2", checkpoint_every=2)
    groups = test_trainer.make_batches(run.start_model)
    with ControlStub(run.token, lambda step: groups[step] if step < 4 else "enough") as control:
        assert test_trainer.finish(test_trainer.start(run, control.url)) == (0, "")
    with ControlStub(run.token, groups.__getitem__) as control:
        assert test_trainer.finish(test_trainer.start(run, control.url)) == (0, "")
    assert [message["step"] for message in control.steps] == [4, 5]
    expected, norms = test_trainer.reference_weights(run.start_model, groups)
    assert gap(load_file(run.trained_model / "model.safetensors"), expected) < 3e-5
    assert [message["metrics"]["grad_norm"] for message in control.steps] == pytest.approx(norms[-2:], rel=1e-4)


@pytest.fixture(scope="module")
def golden_ppo(scratch: Path, batches: Batches) -> ppo_reference.PlainPpo:
    def optimizer(named: dict[str, Any]) -> torch.optim.Optimizer:
        decayed = {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY}
        plain = {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}
        return torch.optim.AdamW([decayed, plain], betas=(0.9, 0.95))

    def rate(peak: float, done: int, steps: int) -> float:
        cosine = (1 + math.cos(math.pi * (done - WARMUP) / (steps - WARMUP))) / 2
        return peak * ((done + 1) / WARMUP if done < WARMUP else MINIMUM + (1 - MINIMUM) * cosine)

    lm = AutoModelForCausalLM.from_pretrained(scratch / "runs" / "run" / "start_model", dtype=torch.float32)
    ppo, done = ppo_reference.PlainPpo(lm, PPO, optimizer), 0
    for number, groups in enumerate(batches.steps, 1):
        ppo.probe(*batches.probe)
        if groups:
            rates = rate(LEARNING_RATE, done - PPO.alone, STEPS - PPO.alone), rate(CRITIC_RATE, done, STEPS)
            ppo.step(number, groups, rates, CLIP)
            done += 1
    return ppo


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in PPO_WORLDS.items() for name in names])
def test_ppo_equals_a_plain_torch_loop(runs: Runs, golden_ppo: ppo_reference.PlainPpo, world: int, name: str) -> None:
    """Critic and policy, two passes over two mini-batches of each batch; all ranks, packings and backends."""
    result, trace = runs.result(world, name), golden_ppo.trace
    for rank in range(world):
        seen = runs.result(world, name, rank)
        assert torch.tensor(seen["evaluated"]) == pytest.approx(torch.tensor(trace.logprobs), abs=2e-5)
        assert torch.tensor(seen["values"]) == pytest.approx(torch.tensor(trace.values), abs=2e-5)
    full = [metrics for metrics in result["metrics"] if metrics["tokens"]]
    assert [m["critic/value_loss"] for m in full] == pytest.approx(trace.value_losses, abs=1e-5)
    assert [m["critic/explained_variance"] for m in full] == pytest.approx(trace.explained, abs=1e-5)
    assert ["loss" in m for m in full] == [place >= PPO.alone for place in range(len(full))]
    assert [m["loss"] for m in full[PPO.alone :]] == pytest.approx(trace.losses, abs=1e-5)
    assert [m["grad_norm"] for m in full[PPO.alone :]] == pytest.approx(trace.norms, rel=2e-5)
    weights = load_file(runs._folder(world) / f"{name}.safetensors")
    assert gap(weights, {n: p.detach() for n, p in golden_ppo.lm.named_parameters()}) < 2e-5
    assert max(m["critic/clip_fraction"] for m in full) > 0


@pytest.mark.parametrize("name", PPO_RESUMED)
def test_a_resumed_ppo_run_is_the_same_bit_by_bit(runs: Runs, name: str) -> None:
    calm, resumed = runs.result(2, name), runs.result(2, f"{name} resumed")
    assert resumed["metrics"] == calm["metrics"]
    assert (resumed["evaluated"], resumed["values"]) == (calm["evaluated"], calm["values"])
    weights = [load_file(runs._folder(2) / f"{n}.safetensors") for n in (name, f"{name} resumed")]
    assert all(torch.equal(weights[1][n], tensor) for n, tensor in weights[0].items())


@pytest.mark.parametrize("name", PPO_LORA_WORLDS[2])
def test_policy_and_critic_with_adapters_learn_the_same_on_every_backend(runs: Runs, name: str) -> None:
    one, two = runs.result(1, "ppo lora zero1"), runs.result(2, name)
    for seen in ("evaluated", "values"):
        assert torch.tensor(two[seen]) == pytest.approx(torch.tensor(one[seen]), abs=2e-5)
        assert torch.tensor(two[seen][-1]) != pytest.approx(torch.tensor(two[seen][0]), abs=1e-2)
    for mine, theirs in zip(two["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-5)
