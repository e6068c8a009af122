"""`run_pipeline` as the command line calls it: a process, a temporary Prefect server, stub stages."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STUBS = Path(__file__).parents[1] / "stub_stages"

DRIVER = """
import sys
from flows.local import run_pipeline
from forebay.config import load_profile
try:
    run_pipeline(load_profile(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home; in it all runs of this file share a scratch, so that Prefect's database is made once."""
    return tmp_path_factory.mktemp("home")


def write_profile(folder: Path, home: Path) -> Path:
    path = folder / "profile.yaml"
    storage = f"{{scratch: {home}/scratch, uri: 'file://{folder}/store'}}"
    path.write_text(f"name: flow\ntraining: {{steps: 4}}\nstorage: {storage}\n")
    return path


def environment(home: Path, **extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join(filter(None, (str(STUBS), clean.get("PYTHONPATH"))))
    return {**clean, "HOME": str(home), "PYTHONPATH": path, **extra}


def processes(home: Path) -> list[str]:
    """Command lines of all live processes that were started with this home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def published(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "store").glob("*/summary.json")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def rows(home: Path, query: str) -> list[Any]:
    with sqlite3.connect(home / "scratch" / "prefect" / "prefect.db") as database:
        return database.execute(query).fetchall()


@pytest.fixture
def waiting_run(home: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of training, with a child process of its own."""
    run = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(write_profile(tmp_path, home))],
        env=environment(home, STUB_TRAIN="wait"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not any(command.startswith("sleep 600") for command in processes(home)):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline, "the run did not reach training in 120 s"
            time.sleep(0.1)
        yield run
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.fixture(scope="module")
def complete_run(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A whole run: (the process, the folder it published to)."""
    folder = tmp_path_factory.mktemp("complete")
    command = [sys.executable, "-c", DRIVER, str(write_profile(folder, home))]
    run = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=150, check=False)
    return run, folder


def test_a_run_brings_its_own_server_and_takes_it_away(
    home: Path, complete_run: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    run, folder = complete_run
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert lines[0].startswith("run flow-")
    assert any("step 4/4, reward 1.000" in line for line in lines)
    assert lines[-1].startswith("published at file://")
    assert published(folder)["status"] == "completed"
    assert processes(home) == []
    assert list(home.iterdir()) == [home / "scratch"]  # nothing in ~/.prefect


def test_its_history_and_artifacts_are_kept(
    home: Path, complete_run: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    run = "(select id from flow_run where state_name = 'Completed')"
    tasks = rows(home, f"select name from task_run where flow_run_id = {run} order by start_time")
    assert [name.rpartition("-")[0] for (name,) in tasks] == [
        "prepare_data",
        "predict_lengths",
        "train",
        "evaluate",
        "publish",
    ]
    artifacts = rows(
        home, f"select key, type from artifact where task_run_id is not null and flow_run_id = {run} order by created"
    )
    assert artifacts == [
        ("response-lengths", "table"),
        ("training", "progress"),
        ("evaluation", "table"),
        ("report", "markdown"),
    ]
    messages = [message for (message,) in rows(home, f"select message from log where flow_run_id = {run}")]
    assert any("step 4/4" in message for message in messages)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_everything_it_started(
    home: Path, waiting_run: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    if number is signal.SIGINT:
        os.killpg(waiting_run.pid, number)  # Ctrl-C reaches the terminal's whole process group
    else:
        waiting_run.send_signal(number)
    output, _ = waiting_run.communicate(timeout=60)
    assert waiting_run.returncode == 130, output
    assert "Traceback" not in output
    summary = published(tmp_path)
    assert summary["status"] == "cancelled"
    assert list(summary["stages"]) == ["prepare_data", "predict_lengths", "train"]
    assert processes(home) == []
    # The server was there until the run had told it how it ended.
    assert rows(home, "select state_name from flow_run order by created")[-1] == ("Crashed",)
