import subprocess
import sys
from pathlib import Path

import pytest

from forebay.config import parse_config
from forebay.errors import RunError
from forebay.run import RunContext
from forebay.training import ranks as launcher
from forebay.training.launch import trainer_command
from forebay.training.worker import read_job


def make_run(tmp_path: Path, ranks: int) -> RunContext:
    values = {"storage": {"scratch": str(tmp_path)}, "training": {"ranks": ranks}}
    return RunContext.create(parse_config(values, "test"))


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, [3], "1"), (1, [0, 1, 2, 3], "4"), (2, [0, 1, 2], "1")])
def test_cores_are_shared_out_as_threads(tmp_path: Path, ranks: int, cores: list[int], threads: str) -> None:
    argv, environment, _ = trainer_command(make_run(tmp_path, ranks), "http://127.0.0.1:1", cores)
    assert environment["OMP_NUM_THREADS"] == threads
    assert ("forebay.training.ranks" in argv) == (ranks > 1)


def test_the_token_is_in_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, 2)
    argv, environment, job = trainer_command(run, "http://127.0.0.1:1", None)
    assert environment["FOREBAY_TOKEN"] == run.token
    assert run.token not in " ".join(argv) + job.read_text()
    monkeypatch.setenv("FOREBAY_TOKEN", run.token)
    assert read_job(job) == (run, "http://127.0.0.1:1")


def test_a_job_without_token_or_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_TOKEN", raising=False)
    with pytest.raises(RunError, match="FOREBAY_TOKEN is not set"):
        read_job(tmp_path / "job.json")
    monkeypatch.setenv("FOREBAY_TOKEN", "t")
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(RunError, match=r"job\.json is not a trainer's job"):
        read_job(tmp_path / "job.json")


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit(2)", 2, ""),
        ("import os; os.kill(os.getpid(), 9)", 1, "trainer: rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_first_rank_that_fails_ends_all(
    code: str, exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = [python("import time; time.sleep(600)"), python(code)]
    assert launcher._watch(processes) == exit_code
    launcher._end(processes)
    assert all(process.returncode is not None for process in processes)
    assert capsys.readouterr().err == said


def test_all_ranks_done_is_success() -> None:
    assert launcher._watch([python(""), python("")]) == 0
