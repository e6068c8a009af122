"""A main script without `if __name__ == "__main__":` is one line at once, not a run that waits for its rewards."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.launch.main_script import require_guard
from forebay.training.tiny_model import make_tokenizer

PIPELINE = """
from flows.local import run_pipeline
from forebay.config import load_profile
run_pipeline(load_profile("profile.yaml"))
"""
REWARDS = """
import asyncio
import pathlib
from forebay.config import RewardConfig
from forebay.rewards.pool import RewardPool
{guard}
    pool = RewardPool(RewardConfig(name="{name}"), pathlib.Path("."), 16)
    try:
        print(asyncio.run(pool.score([([5], True)], '"a1"', "x")))
    finally:
        pool.close()
"""
FORGOTTEN = 'if "not": # __main__'


def ends(folder: Path, script: str, name: str = "main.py") -> tuple[int, str, str]:
    """(exit code, stdout, last line of stderr) of a script, which must be quick."""
    (folder / "profile.yaml").write_text("storage: {scratch: here}\n")
    make_tokenizer(["a1", "b1"]).save(str(folder / "tokenizer.json"))
    (folder / name).write_text(script)
    began = time.monotonic()
    root = Path(__file__).resolve().parents[2]
    answer = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert time.monotonic() - began < 60
    return answer.returncode, answer.stdout, (answer.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("name", ["main.py", "main"])
def test_a_pipeline_in_an_unguarded_script_does_not_start(tmp_path: Path, name: str) -> None:
    code, _, line = ends(tmp_path, PIPELINE, name)
    assert code == 1
    assert line.replace(f" {name}:", f" {tmp_path}/{name}:") == (
        f"forebay.errors.UserError: {tmp_path}/{name}: every process that Forebay starts for rewards and data would "
        'run this script again: put what it does under `if __name__ == "__main__":`'
    )
    assert not (tmp_path / "here").exists(), "nothing was begun"


def test_workers_are_not_started_by_an_unguarded_script(tmp_path: Path) -> None:
    code, _, line = ends(tmp_path, REWARDS.format(guard="if True:", name="exact"))
    assert code == 1
    assert "would run this script again: put what it does under" in line


def test_a_guard_that_is_not_around_the_call_is_told_by_the_first_worker(tmp_path: Path) -> None:
    code, out, line = ends(tmp_path, REWARDS.format(guard=FORGOTTEN, name="exact"))
    assert (code, out) == (1, "")
    assert "main.py: every process that Forebay starts for rewards and data would run this script again" in line


def test_with_its_guard_a_script_has_its_rewards(tmp_path: Path) -> None:
    code, out, _ = ends(tmp_path, REWARDS.format(guard='if __name__ == "__main__":', name="exact"))
    assert (code, out.startswith("[")) == (0, True)


def test_a_module_of_rewards_that_starts_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PIPELINE + "\ndef reward(response, answer, prompt):\n    return 1.0\n")
    code, out, line = ends(tmp_path, REWARDS.format(guard='if __name__ == "__main__":', name="mine:reward"))
    assert (code, out) == (1, "")
    assert "reward mine:reward: cannot import mine (UserError: it starts Forebay when it is imported: put what" in line
    assert not (tmp_path / "here").exists()


def test_main_modules_that_no_worker_runs_again_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    require_guard()  # python -c, a notebook
    for name in ("forebay", "gone.py"):
        monkeypatch.setattr(main, "__file__", str(tmp_path / name), raising=False)
        require_guard()
