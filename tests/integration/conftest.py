"""One real vLLM server for the whole test run, with a tiny random model."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.config import parse_config
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.launch.ports import require_free
from forebay.run import RunContext
from tests.support.tiny_lm import make_start_model


@dataclass
class Served:
    """The fleet of one engine, the loop that it lives in, and the folders of its models."""

    runner: asyncio.Runner
    fleet: Fleet
    run: RunContext
    first: Path
    """The model it was started with; `second` has other weights, same shapes."""
    second: Path
    version: int = 0
    """Last version given to a snapshot."""

    @property
    def engine(self):
        return self.fleet.engines[0]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    # Heads of 32: vLLM's CPU attention has no smaller ones.
    first = make_start_model(folder / "first", hidden=128, layers=2, seed=1)
    second = make_start_model(folder / "second", hidden=128, layers=2, seed=2)
    values = {
        "name": "served",
        "model": {"path": str(first), "max_model_len": 256},
        "generation": {"engines": 1, "max_new_tokens": 200, "kv_cache": "64M", "temperature": 0.8},
        "storage": {"scratch": str(folder / "scratch")},
    }
    config = parse_config(values, "integration tests")
    run = RunContext.create(config)
    with asyncio.Runner() as runner:
        fleet = Fleet(run, first, plan_cores(config))
        runner.run(fleet.__aenter__())
        try:
            yield Served(runner, fleet, run, first, second)
        finally:
            pids = [fleet.process(0).pid, *fleet.process(0).tree()]
            memory = shared_memory_of(pids)
            port = int(fleet.engines[0].url.rpartition(":")[2])
            runner.run(fleet.__aexit__(None, None, None))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(path.exists() for path in memory)
    require_free("127.0.0.1", port, "generation.base_port")


def shared_memory_of(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that these processes map or hold open."""
    found = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names = [line.split(maxsplit=5)[-1] for line in lines]
        names += [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        found |= {Path(name) for name in names if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")}
    return found
