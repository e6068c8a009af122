"""LoRA end to end: a real trainer's snapshots on a real engine, whose samples the trainer trains next."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forebay.config import parse_config
from forebay.control.types import NOTHING, Snapshot
from forebay.run import RunContext
from tests.integration.conftest import Served
from tests.integration.test_generation import serve
from tests.integration.test_trainer import finish, start
from tests.support.control_stub import Batch, ControlStub
from tests.support.reference_model import ReferenceModel

STEPS, GROUPS, SIZE, DEADLINE_S = 3, 3, 4, 240


def make_run(served: Served, folder: Path, publish: str) -> RunContext:
    values = {
        "model": {"max_model_len": 256},
        "generation": {"max_new_tokens": 200, "temperature": 0.8},
        "storage": {"scratch": str(folder)},
        "training": {
            "steps": STEPS,
            "learning_rate": 2e-2,
            "warmup_steps": 0,
            "streaming": False,
            "zero_stage": 2,
            "lora": {"rank": 4, "alpha": 8.0, "publish": publish},
        },
        "algorithm": {"kl": "loss", "kl_coefficient": 0.01},
    }
    run = RunContext.create(parse_config(values, "test"))
    run.start_model.symlink_to(served.first)
    return run


def sampled(served: Served, step: int) -> Batch:
    """By the engine as it is; the reward is the share of even tokens."""
    groups = []
    for number in range(GROUPS):
        prompt, seed = [2 + number, 7, 9], 100 * step + number
        samples = [
            {
                "ids": sample.ids,
                "logprobs": sample.logprobs,
                "reward": sum(token % 2 == 0 for token in sample.ids) / len(sample.ids),
                "oldest_version": step - 1,
            }
            for sample in served.runner.run(served.engine.generate(prompt, [NOTHING] * SIZE, seed))
        ]
        groups.append({"group_id": seed, "prompt_ids": prompt, "staleness": 0, "samples": samples})
    return {"step": step, "version": step - 1, "groups": groups}


def published(control: ControlStub, count: int) -> Snapshot:
    deadline = time.monotonic() + DEADLINE_S
    while len(control.snapshots) < count:
        assert time.monotonic() < deadline, f"there is no snapshot {count}"
        time.sleep(0.02)
    return Snapshot(**{name: control.snapshots[-1][name] for name in ("version", "path", "manifest_sha256")})


def train(served: Served, folder: Path, publish: str) -> tuple[RunContext, list[dict[str, Any]], Batch]:
    """(the run, each step's metrics, the last batch)."""
    serve(served, "first", folder)
    run, batches = make_run(served, folder, publish), dict[int, Batch]()
    with ControlStub(run.token, batches.get) as control:
        process = start(run, control.url)
        try:
            for step in range(1, STEPS + 1):
                if step > 1:
                    served.runner.run(served.engine.refresh(published(control, step - 1), "retract"))
                batches[step] = sampled(served, step)
        finally:
            if len(batches) < STEPS:
                process.kill()
        assert finish(process) == (0, "")
    return run, [message["metrics"] for message in control.steps], batches[STEPS]


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_engine_and_trainer_agree_on_every_version(served: Served, tmp_path: Path, publish: str) -> None:
    run, metrics, last = train(served, tmp_path, publish)
    assert len(metrics) == STEPS
    assert all(m["mismatch/max_abs"] < 1e-3 for m in metrics)
    files = {p.name: p.stat().st_size for p in (run.snapshots / "v00000002").iterdir()}
    assert ("adapter_model.safetensors" in files) == (publish == "adapter")
    assert ("model.safetensors" in files) == (publish == "merged")
    # The weights have moved so far that an engine which had missed a version would show.
    sample, first = last["groups"][0]["samples"][0], ReferenceModel(served.first)
    old = first.logprobs(last["groups"][0]["prompt_ids"], sample["ids"], 0.8)
    assert max(abs(a - b) for a, b in zip(old, sample["logprobs"], strict=True)) > 0.05
    # The end is a plain model.
    trained, base = (load_file(f / "model.safetensors") for f in (run.trained_model, served.first))
    assert trained.keys() == base.keys()
    changed = {name for name in base if not torch.equal(trained[name], base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    ReferenceModel(run.trained_model)
