"""`forebay run` as a user types it: the whole pipeline on real servers, and what is left after it is stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest

FOREBAY = str(Path(sys.executable).with_name("forebay"))
SMALL = (
    "model.warm_start.steps=150",
    "data.maze.sizes={3: 1.0, 4: 1.0}",
    "data.train_prompts=64",
    "data.validation_prompts=8",
    "data.test_prompts=32",
    "lengths.profile_prompts=16",
    "generation.max_new_tokens=32",
    "control.work_in_progress=2.0",  # else all groups of three steps may be there before the first one
)
PATIENCE_S = 600  # two minutes where nothing else runs


class Run:
    """A `forebay run` in a session of its own; everything it starts inherits a mark in the environment."""

    def __init__(self, folder, *settings):
        self.folder, self.mark = folder, f"FOREBAY_TEST_MARK={uuid.uuid4().hex}"
        self.shared_memory = set(os.listdir("/dev/shm"))
        name, _, value = self.mark.partition("=")
        settings = (*SMALL, f"storage.scratch={folder}/scratch", f"storage.uri=file://{folder}/runs", *settings)
        command = [FOREBAY, "run", "profiles/quickstart_cpu.yaml"]
        self.output = folder / f"{value}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *(word for text in settings for word in ("--set", text))],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {name: value},
                start_new_session=True,
            )

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, pattern):
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            time.sleep(0.1)

    def summary(self):
        run_id = re.search(r"^run (\S+)", self.text, re.MULTILINE)[1]
        return json.loads((self.folder / "runs" / run_id / "summary.json").read_text())

    def processes(self):
        """pid -> command line of the living processes that carry the mark."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                if self.mark.encode() in environment:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile
                continue
        return found

    def left(self):
        return list(self.processes().values())

    def pids(self, word):
        """Processes with this word in their command line, guards left out."""
        return sorted(pid for pid, line in self.processes().items() if word in line and "guard.py" not in line)

    def assert_nothing_left(self):
        deadline = time.monotonic() + 10
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.left() == []
        assert set(os.listdir("/dev/shm")) <= self.shared_memory

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shared, so that the start model is made once."""
    return tmp_path_factory.mktemp("pipeline")


def test_the_whole_pipeline_with_two_ranks(folder):
    run = Run(folder, "training.steps=3", "training.ranks=2", "control.sync_every=2", "evaluation.every_versions=1")
    try:
        assert run.process.wait(PATIENCE_S) == 0, run.text
    finally:
        run.end()
    summary = run.summary()
    assert summary["status"] == "completed"
    assert set(summary["stages"]) == {"prepare_data", "predict_lengths", "train", "evaluate", "publish"}
    assert summary["wall_s"] >= sum(summary["stages"].values()) - 0.01
    assert summary["mode"] == "fully_async"
    assert summary["evaluation"]["n"] == 32
    assert 0 <= summary["evaluation"]["p_value"] <= 1
    fates = summary["fates"]
    assert fates["admitted"] == sum(count for fate, count in fates.items() if fate != "admitted")
    assert fates["trained"] + fates["filtered"] == 3 * 16
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == 4
    assert summary["step_time_s"] > 0
    assert 0 <= summary["train_wait_ratio"] <= 1
    assert summary["tokens_per_s"] > 0
    start = summary["evaluation"]["during"][0]  # version 0 on the eight validation prompts
    assert (start["version"], start["prompts"], start["left_out"]) == (0, 8, 0)
    assert start["tokens"] > 0
    assert -1 <= summary["lengths"]["spearman"] <= 1
    assert (summary["learning"]["correction"], summary["learning"]["critic"]) == ("behaviour", None)
    assert 0 < summary["learning"]["mismatch"]["mean_abs"] < 1e-3
    published = folder / "runs" / summary["run_id"]
    assert {"MANIFEST.json", "report.png", "report.md", "ledger.parquet", "model", "schedule"} <= set(
        os.listdir(published)
    )
    assert (published / "model" / "model.safetensors").stat().st_size > 900_000
    run.assert_nothing_left()


def test_ctrl_c_ends_everything_and_says_so(folder):
    run = Run(folder, "training.steps=2000", "mode=sync")
    try:
        run.wait_for(r"step \d+/2000")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(90) == 130, run.text
    finally:
        run.end()
    assert run.summary()["status"] == "cancelled"
    assert "Traceback" not in run.text
    run.assert_nothing_left()


def test_kill_9_leaves_no_process(folder):
    run = Run(folder, "training.steps=2000")
    try:
        run.wait_for(r"step \d+/2000")
        assert any("vllm" in command for command in run.left())
        run.process.kill()
        run.process.wait(10)
        run.assert_nothing_left()
    finally:
        run.end()


def test_engines_and_trainer_that_are_killed_or_stopped_cost_no_group(folder):
    """One engine is killed, the other one is stopped (it hangs), the trainer is killed: the run comes to its end, and
    every group has one fate."""
    steps = 40
    run = Run(
        folder,
        f"training.steps={steps}",
        "training.checkpoint_every=4",
        "generation.engines=2",
        "generation.stall_timeout_s=5",
        "generation.max_restarts=6",
    )
    try:
        run.wait_for(r"step \d+/40")
        engines = run.pids("EngineCore")
        assert len(engines) == 2
        os.kill(engines[0], signal.SIGKILL)
        os.kill(engines[1], signal.SIGSTOP)
        for trainer in run.pids("forebay.training.worker"):
            os.kill(trainer, signal.SIGKILL)
        assert run.process.wait(PATIENCE_S) == 0, run.text
    finally:
        run.end()
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["engines"]["restarts"] >= 2
    assert summary["trainer"]["restarts"] == 1
    fates = summary["fates"]
    assert fates["in_flight"] == 0
    assert fates["trained"] + fates["filtered"] == steps * 16
    assert fates["admitted"] == sum(count for fate, count in fates.items() if fate != "admitted")
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    rows = pq.read_table(folder / "runs" / summary["run_id"] / "ledger.parquet").to_pylist()
    assert sorted(row["group_id"] for row in rows) == list(range(fates["admitted"]))
    assert any(row["attempts"] > 1 and len(set(row["engines"])) >= 1 for row in rows)
    run.assert_nothing_left()
