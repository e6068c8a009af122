"""The trainer as it runs: real processes, real DeepSpeed, a Control Unit of a few lines.

The golden is a loop in plain torch over unpadded, unpacked sequences: transformers' own forward, torch's AdamW and
gradient clipping, and the loss written out below.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from forebay.config import parse_config
from forebay.launch.ports import hold_port
from forebay.run import RunContext
from forebay.training.launch import trainer_command
from forebay.training.snapshots import verify_files
from tests.support.control_stub import Batch, ControlStub
from tests.support.tiny_lm import VOCABULARY, make_start_model

DEADLINE_S = 120
STEPS, EMPTY_STEP, SYNC_EVERY = 5, 3, 2
LEARNING_RATE, WARMUP, WEIGHT_DECAY, CLIP = 2e-3, 2, 0.1, 0.5
TEMPERATURE = 0.8
PPO: dict[str, dict[str, Any]] = {
    "algorithm": {"advantage": "gae", "kl": "reward"},
    "critic": {"learning_rate": 1e-3, "warmup_steps": 1},
    "training": {"updates_per_batch": 2, "mini_batches": 2},
}


def make_run(
    folder: Path,
    *,
    dtype: str = "float32",
    scaling: str = "none",
    sections: dict[str, dict[str, Any]] | None = None,
    **training: Any,
) -> RunContext:
    defaults = {
        "steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP,
        "weight_decay": WEIGHT_DECAY,
        "grad_clip": CLIP,
        "micro_batch_tokens": 64,
        "step_timeout_s": 60,
    }
    values: dict[str, dict[str, Any]] = {
        "model": {"max_model_len": 64, "dtype": dtype},
        "generation": {"max_new_tokens": 32, "temperature": TEMPERATURE},
        "control": {"sync_every": SYNC_EVERY, "learning_rate_scaling": scaling},
        "storage": {"scratch": str(folder)},
        "training": defaults | training,
        "algorithm": {"mismatch_alarm": 10.0},  # these batches come from no engine
    }
    for name, changes in (sections or {}).items():
        values[name] = {**values.get(name, {}), **changes}
    run = RunContext.create(parse_config(values, "test"))
    make_start_model(run.start_model)
    return run


def start(run: RunContext, url: str, before: str = "") -> subprocess.Popen[str]:
    """`before`: Python code that the (one) rank runs first."""
    argv, environment, _ = trainer_command(run, url, [0])
    if before:
        main = "import sys\nfrom forebay.training.worker import main\nsys.exit(main(sys.argv[1:]))"
        argv = [argv[0], "-c", f"{before}\n{main}", *argv[3:]]
    return subprocess.Popen(argv, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, errors


@torch.no_grad()
def response_logprobs(lm: PreTrainedModel, prompt: list[int], ids: list[int]) -> torch.Tensor:
    logits = lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def make_batches(start_model: Path) -> dict[int, Batch]:
    """Random responses; behaviour log-probabilities near the start model's, so that some ratios are clipped. The
    groups of the first step are exact (version 0, no noise)."""
    lm = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    rng = random.Random(5)

    def sample(prompt: list[int], step: int) -> dict[str, Any]:
        ids = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(2, 30))]
        noise = 0.0 if step == 1 else 0.3
        logprobs = [p + rng.gauss(0, noise) for p in response_logprobs(lm, prompt, ids).tolist()]
        return {"ids": ids, "logprobs": logprobs, "reward": rng.random(), "oldest_version": 0}

    def group(number: int, step: int) -> dict[str, Any]:
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(3, 20))]
        samples = [sample(prompt, step) for _ in range(4)]
        return {"group_id": number, "prompt_ids": prompt, "staleness": 0, "samples": samples}

    return {
        step: {
            "step": step,
            "version": (step - 1) // SYNC_EVERY,
            "groups": [] if step == EMPTY_STEP else [group(10 * step + i, step) for i in range(3)],
        }
        for step in range(1, STEPS + 1)
    }


def reference_weights(start_model: Path, batches: dict[int, Batch]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights after all steps, gradient norm of each step that has one)."""
    lm = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32, attn_implementation="sdpa")
    named = dict(lm.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    norms = []
    for batch in batches.values():
        if not batch["groups"]:
            continue
        loss, tokens = torch.zeros(()), 0
        for group in batch["groups"]:
            rewards = torch.tensor([s["reward"] for s in group["samples"]], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for sample, advantage in zip(group["samples"], advantages.tolist(), strict=True):
                with torch.enable_grad():
                    logprobs = response_logprobs.__wrapped__(lm, group["prompt_ids"], sample["ids"])  # type: ignore[attr-defined]
                ratio = (logprobs - torch.tensor(sample["logprobs"])).exp()
                low, high = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
                loss = loss - torch.where(low < high, low, high).sum()
                tokens += len(sample["ids"])
        optimizer.zero_grad()
        (loss / tokens).backward()
        for parameters in optimizer.param_groups:
            parameters["lr"] = LEARNING_RATE * min(1.0, (len(norms) + 1) / WARMUP)
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        optimizer.step()
    return {name: p.detach() for name, p in named.items()}, norms


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "streaming"),
    [(1, 1, False), (2, 2, False), (2, 3, False), (1, 1, True), (2, 1, True), (2, 2, True), (2, 3, True)],
)
def test_trained_weights_equal_a_plain_torch_loop(tmp_path: Path, ranks: int, zero_stage: int, streaming: bool) -> None:
    """Streamed: group by group. There the learning rate comes about by scaling, so that this is seen too."""
    scaled = {"scaling": "inverse_interval", "learning_rate": LEARNING_RATE * SYNC_EVERY} if streaming else {}
    run = make_run(tmp_path, ranks=ranks, zero_stage=zero_stage, streaming=streaming, **scaled)
    batches = make_batches(run.start_model)
    not_yet = {2, 4}

    def batch_of(step: int) -> Batch | None:
        if step in not_yet:
            not_yet.discard(step)
            return None
        return batches[step]

    with ControlStub(run.token, batch_of) as control:
        code, errors = finish(start(run, control.url))
    assert (code, errors) == (0, "")
    assert json.loads((run.root / "trainer_done.json").read_text()) == {"steps": STEPS, "reason": None}

    expected, norms = reference_weights(run.start_model, batches)
    verify_files(run.trained_model)
    trained = load_file(run.trained_model / "model.safetensors")
    assert trained.keys() == expected.keys() == load_file(run.start_model / "model.safetensors").keys()
    assert max(float((trained[n] - expected[n]).abs().max()) for n in expected) < 3e-5
    before = load_file(run.start_model / "model.safetensors")
    assert min(float((trained[n] - before[n]).abs().max()) for n in expected) > 1e-3

    assert [s["step"] for s in control.steps] == list(range(1, STEPS + 1))
    metrics = {s["step"]: s["metrics"] for s in control.steps}
    assert [metrics[s]["grad_norm"] for s in metrics if s != EMPTY_STEP] == pytest.approx(norms, rel=1e-4)
    assert metrics[EMPTY_STEP] == {"tokens": 0.0}
    assert metrics[1]["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics[1]["mismatch/max_abs"] < 1e-4
    assert metrics[1]["clip_fraction"] == 0 < metrics[2]["clip_fraction"]
    assert "mismatch/max_abs" not in metrics[4]
    received = [m.get("received") for m in control.asked if m["step"] == 1]
    assert received == ([0, 1, 2, 3] if streaming else [None])
    assert [metrics[s]["learning_rate"] for s in (1, 2, 4)] == pytest.approx([1e-3, 2e-3, 2e-3])
    check_snapshots(run, control)


def check_snapshots(run: RunContext, control: ControlStub) -> None:
    assert [s["version"] for s in control.snapshots] == [1, 2]
    for snapshot in control.snapshots:
        manifest = verify_files(Path(snapshot["path"]), snapshot["manifest_sha256"])
        assert manifest["version"] == snapshot["version"]
    said = [path.rsplit("/", 1)[-1] for path in control.calls if "batches" not in path]
    for version in (1, 2):  # written while training goes on, but no earlier than the report of the step
        place = [i for i, word in enumerate(said) if word == "snapshots"][version - 1]
        assert said[:place].count("steps") >= version * SYNC_EVERY
    model = AutoModelForCausalLM.from_pretrained(run.trained_model)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "w5 w6"}]
    assert AutoTokenizer.from_pretrained(run.trained_model).apply_chat_template(chat, return_dict=False) == [5, 6]


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "dtype", "streaming", "sections"),
    [
        (1, 1, "float32", True, {}),
        (2, 2, "float32", False, {}),
        (2, 3, "float32", True, {}),
        (1, 1, "bfloat16", False, {}),
        (2, 2, "bfloat16", False, PPO),
    ],
)
def test_a_killed_trainer_goes_on_from_its_checkpoint(
    tmp_path: Path, ranks: int, zero_stage: int, dtype: str, streaming: bool, sections: dict[str, dict[str, Any]]
) -> None:
    """Killed in step 5, with a checkpoint of step 4 that the Control Unit knows. The weights are those of a run that
    nothing happened to, bit by bit; with a critic too."""
    options = {"ranks": ranks, "zero_stage": zero_stage, "dtype": dtype, "streaming": streaming, "checkpoint_every": 2}
    calm, killed = (make_run(tmp_path / name, sections=sections, **options) for name in ("calm", "killed"))
    batches = make_batches(calm.start_model)
    with ControlStub(calm.token, batches.__getitem__) as control:
        assert finish(start(calm, control.url)) == (0, "")
    last = control.steps[-1]["metrics"]
    assert ("critic/value_loss" in last) == bool(sections)

    with ControlStub(killed.token, lambda step: batches[step] if step < STEPS else None) as control:
        process = start(killed, control.url)
        try:
            until(lambda: control.checkpoints[-1:] == [4], process)
            for pid in children(process) or [process.pid]:
                os.kill(pid, signal.SIGKILL)
            assert process.wait(DEADLINE_S) != 0
        finally:
            process.kill()
            process.communicate()
    first = {path.name: path.stat().st_mtime_ns for path in killed.snapshots.iterdir()}
    assert sorted(path.name for path in killed.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]

    with ControlStub(killed.token, batches.__getitem__) as control:
        assert finish(start(killed, control.url)) == (0, "")
    assert {message["step"] for message in control.asked} == {STEPS}
    assert [message["step"] for message in control.steps] == [STEPS]
    assert control.steps[-1]["metrics"] == last
    assert {path.name: path.stat().st_mtime_ns for path in killed.snapshots.iterdir()} == first
    expected, resumed = (load_file(run.trained_model / "model.safetensors") for run in (calm, killed))
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_steps_trained_again_lead_to_the_snapshots_that_are_there(tmp_path: Path) -> None:
    """The newest checkpoint is older than the newest snapshot, which engines may be using."""
    run = make_run(tmp_path, checkpoint_every=3)
    batches = make_batches(run.start_model)
    with ControlStub(run.token, lambda step: batches[step] if step < STEPS else None) as control:
        process = start(run, control.url)
        try:
            until(lambda: [s["version"] for s in control.snapshots] == [1, 2], process)
        finally:
            process.kill()
            process.communicate()
        published = control.snapshots[-1]
        control.batch_of = batches.__getitem__
        control.steps.clear()
        control.snapshots.clear()
        assert finish(start(run, control.url)) == (0, "")
    assert [message["step"] for message in control.steps] == [4, 5]
    assert control.snapshots == [published]
    verify_files(run.trained_model)


def test_a_run_that_ends_early_leaves_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)
    batches = make_batches(run.start_model)
    with ControlStub(run.token, lambda step: batches[step] if step < 3 else "too many restarts") as control:
        assert finish(start(run, control.url)) == (0, "")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    with ControlStub(run.token, batches.__getitem__) as control:
        assert finish(start(run, control.url)) == (0, "")
    assert [message["step"] for message in control.steps] == [3, 4, 5]
    assert json.loads((run.root / "trainer_done.json").read_text()) == {"steps": STEPS, "reason": None}


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


SLOW_DISK = """
import os, pathlib, time
from forebay.training import snapshots
write = snapshots._write
def slow(path, data):
    while path.name == "model-00001.safetensors" and not (go := pathlib.Path(os.environ["GO"])).exists():
        time.sleep(0.02)
    if path.name == "model-00001.safetensors" and go.read_text():
        raise OSError(28, go.read_text())
    write(path, data)
snapshots._write = slow
"""


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 follows step 2 and is not on the disk before step 3 is trained; the checkpoint of step 3 waits for it;
    version 2, which follows step 4, waits too."""
    run = make_run(tmp_path, checkpoint_every=3)
    batches = make_batches(run.start_model)
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    with ControlStub(run.token, batches.__getitem__) as control:
        process = start(run, control.url, SLOW_DISK)
        try:
            until(lambda: any(message["step"] == 4 for message in control.asked), process)
            time.sleep(0.5)
            assert [message["step"] for message in control.steps] == [1, 2, 3]
            assert control.snapshots == []
            assert [path.name for path in run.snapshots.iterdir()] == [f".v00000001.tmp-{process.pid}"]
            assert [path.name for path in run.checkpoints.iterdir()] == [".step-00000003.tmp"]
            go.write_text("")
            assert finish(process) == (0, "")
        finally:
            process.kill()
    assert [message["version"] for message in control.snapshots] == [1, 2]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000003"]
    expected, _ = reference_weights(run.start_model, batches)
    trained = load_file(run.trained_model / "model.safetensors")
    assert max(float((trained[n] - expected[n]).abs().max()) for n in expected) < 3e-5
    for snapshot in control.snapshots:
        verify_files(Path(snapshot["path"]), snapshot["manifest_sha256"])


def test_a_snapshot_that_cannot_be_written_ends_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    batches = make_batches(run.start_model)
    (tmp_path / "go").write_text("No space left on device")
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    with ControlStub(run.token, lambda step: batches[step] if step < 4 else None) as control:
        code, errors = finish(start(run, control.url, SLOW_DISK))
    assert code == 1
    place = run.snapshots / "v00000001"
    assert errors == (
        f"trainer: cannot write the weights of version 1 to {place}: [Errno 28] No space left on device\n"
    )
    assert control.snapshots == []


def test_the_end_of_the_run_stops_the_trainer_cleanly(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    batch = make_batches(run.start_model)[1]
    with ControlStub(run.token, lambda step: batch if step == 1 else "no prompts are left") as control:
        code, errors = finish(start(run, control.url))
    assert (code, errors) == (0, "")
    assert json.loads((run.root / "trainer_done.json").read_text()) == {"steps": 1, "reason": "no prompts are left"}
    assert not run.trained_model.exists()


def test_a_run_that_is_over_after_the_last_step_still_leaves_the_trained_model(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    batches = make_batches(run.start_model)

    class Over(ControlStub):
        def answer(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
            if path == "/v1/snapshots":
                return 410, {"reason": "over"}
            return super().answer(path, message)

    with Over(run.token, batches.__getitem__) as control:
        code, errors = finish(start(run, control.url))
    assert (code, errors) == (0, "")
    assert json.loads((run.root / "trainer_done.json").read_text()) == {"steps": 2, "reason": None}
    verify_files(run.trained_model)


def test_a_dead_control_unit_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, step_timeout_s=2)
    with hold_port("127.0.0.1", 0) as held:  # nobody listens there, and nobody else can begin to meanwhile
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        code, errors = finish(start(run, url))
    assert code == 1
    assert errors == f"trainer: the Control Unit at {url} gave no answer to /v1/batches/next for 2 s (ConnectError)\n"


def test_sigterm_ends_all_ranks_promptly(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)

    def not_yet(step: int) -> None:
        time.sleep(0.2)

    with ControlStub(run.token, not_yet) as control:
        process = start(run, control.url)
        try:
            until(lambda: "/v1/batches/next" in control.calls, process)
            ranks = children(process)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert process.wait(DEADLINE_S) == 143
        finally:
            process.kill()
    assert time.monotonic() - began < 4
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
