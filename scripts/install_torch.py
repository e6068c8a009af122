"""Install PyTorch from the first source that has a CPU build of the version that pyproject.toml pins.

Order: the configured pip sources (a `+cpu` build, then any build that asks for no CUDA library), PyTorch's own index
of CPU wheels, and last the plain release, whatever it needs. Says which it took. Only pip's own settings name indexes,
except for PyTorch's public one. No source can hang: each has a deadline, and an unreachable index few retries.
`--plan` says what would be taken and installs nothing. Runs in the environment that it fills; standard library only.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DOWNLOAD_DEADLINE_S = 900
"""For one source of the CPU build (about 200 MB)."""
LOOK_DEADLINE_S = 60
"""For asking which build pip would take: an index without separate metadata makes pip fetch the whole wheel."""
CUDA_NAMES = re.compile(r"^(nvidia|cuda|triton)\b", re.IGNORECASE)


def pinned_version(pyproject: Path) -> str:
    """The version in the `torch==X` line of the extra `cpu`."""
    lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["optional-dependencies"]["cpu"]
    return next(str(line).removeprefix("torch==") for line in lines if line.startswith("torch=="))


def is_cpu_build(requires: Sequence[str]) -> bool:
    """Whether a wheel with these `Requires-Dist` lines does without CUDA's libraries (extras do not count)."""
    return not any(CUDA_NAMES.match(line) for line in requires if "extra ==" not in line)


def pip(*arguments: str, deadline_s: float, quiet: bool = False) -> bool:
    """Run this environment's pip; False if it failed or passed the deadline."""
    command = [sys.executable, "-m", "pip", *arguments]
    output = subprocess.DEVNULL if quiet else None
    try:
        return subprocess.run(command, timeout=deadline_s, stdout=output, stderr=output, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def plain_is_cpu(version: str) -> bool:
    """Whether the build that pip would take for `torch==version` is for the CPU only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        look = ("install", "--dry-run", "--ignore-installed", "--no-deps", "--retries", "2", "--report", str(report))
        if not pip(*look, f"torch=={version}", deadline_s=LOOK_DEADLINE_S, quiet=True):
            return False
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return bool(found) and is_cpu_build(found[0]["metadata"].get("requires_dist", []))


def install(version: str, *, plan: bool) -> str | None:
    """Install torch and return a description of the source, or None if no source has it."""
    act = ("install", "-qq", "--retries", "2", *(["--dry-run"] if plan else []))
    cpu = f"torch=={version}+cpu"
    if pip(*act, "--no-deps", cpu, deadline_s=DOWNLOAD_DEADLINE_S, quiet=True):
        return "the CPU build from the configured pip sources"
    if plain_is_cpu(version) and pip(*act, "--no-deps", f"torch=={version}", deadline_s=DOWNLOAD_DEADLINE_S):
        return "the plain release from the configured pip sources, which is a CPU build"
    print(f"forebay: the configured pip sources have no CPU build of torch {version}; asking {CPU_INDEX}", flush=True)
    only = ("--index-url", CPU_INDEX, "--timeout", "10", "--retries", "0")
    if pip(*act, "--no-deps", *only, cpu, deadline_s=DOWNLOAD_DEADLINE_S, quiet=True):
        return f"the CPU build from {CPU_INDEX}"
    print("forebay: not there either; taking the plain release with its CUDA libraries (gigabytes)", flush=True)
    if pip(*act, f"torch=={version}", deadline_s=4 * DOWNLOAD_DEADLINE_S):
        return "the plain release, a CUDA build that also runs on the CPU"
    return None


def main(arguments: Sequence[str]) -> int:
    version = pinned_version(Path(__file__).resolve().parent.parent / "pyproject.toml")
    plan = "--plan" in arguments
    source = install(version, plan=plan)
    if source is None:
        print(f"forebay: no pip source has torch {version} for this Python and machine (see above)", file=sys.stderr)
        return 2
    name = version if plan else importlib.metadata.version("torch")
    print(f"forebay: torch {name}: {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
