"""Checkpoints: from where a trainer that died goes on.

`checkpoints/step-00000010/` = {`state.json`, `rank-0.safetensors`, ...}, one file of tensors for each rank.

Invariants:
- A folder under its final name is complete and on the disk: it is filled under a hidden name, `state.json` last.
- The trainer waits for a copy of the state in memory, not for the disk; there is one checkpoint in the making at most.
- Nothing is unpickled.
"""

import json
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.errors import DeadlineError, RunError
from forebay.training.distributed import Ranks
from forebay.training.snapshots import sync_to_disk

KEEP = 2
POLL_S = 0.02
_FOLDER = re.compile(r"step-\d{8,}")
_STRAY = re.compile(r"\.step-\d{8,}\.tmp")


class Checkpoints:
    """All ranks construct and call it alike; they share the folder."""

    def __init__(self, folder: Path, ranks: Ranks, layout: dict[str, int | str], timeout_s: float) -> None:
        """`layout`: what a checkpoint must agree on to be loaded. All ranks meet here, behind the clearing up of what
        a dead trainer left half done."""
        self._folder, self._rank, self._world, self._timeout_s = folder, ranks.rank, ranks.world, timeout_s
        self._layout = {"ranks": ranks.world, **layout}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[int] | None = None
        self._announced = 0
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _STRAY.fullmatch(path.name):
                    shutil.rmtree(path)
        ranks.sum(torch.zeros(1))

    def load(self) -> tuple[int, dict[str, Tensor]] | None:
        """(step, this rank's tensors) of the newest checkpoint, or None. Raises `RunError` if it is of no use here."""
        steps = _steps(self._folder)
        if not steps:
            return None
        folder = self._folder / _name(steps[-1])
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            step, layout = int(state["step"]), state["layout"]
            if layout != self._layout:
                raise RunError(f"the checkpoint {folder} was made with {layout}, this trainer has {self._layout}")
            return step, load_file(folder / _file(self._rank))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunError(f"the checkpoint {folder} cannot be read ({type(error).__name__}: {error})") from None

    def save(self, step: int, state: dict[str, Tensor], after: Future[None] | None = None) -> None:
        """Write in the background; `state` must be a copy. It becomes complete after `after` (rank 0), if that goes
        well. Raises what went wrong with the one before."""
        self.wait()
        self._pending = self._writer.submit(self._write, step, state, after)

    def finished(self) -> int | None:
        """Rank 0: the step of a checkpoint that has become complete since the last call. Raises what went wrong."""
        if self._pending is None or not self._pending.done() or self._pending.result() == self._announced:
            return None
        self._announced = self._pending.result()
        return self._announced

    def wait(self) -> None:
        """Until nothing is in the making; raises what went wrong."""
        if self._pending is not None:
            self._pending.result()

    def _write(self, step: int, state: dict[str, Tensor], after: Future[None] | None) -> int:
        folder = self._folder / f".{_name(step)}.tmp"
        try:
            folder.mkdir(exist_ok=True)
            file = folder / _file(self._rank)
            save_file(state, file.with_suffix(".part"))
            sync_to_disk(file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
            if self._rank == 0:
                if after is not None:
                    after.result()
                self._complete(folder, step)
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot write the checkpoint of step {step} to {self._folder}: {error}") from None
        return step

    def _complete(self, folder: Path, step: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(self._world))
        while missing := {rank for rank in missing if not (folder / _file(rank)).exists()}:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"ranks {sorted(missing)} did not write their part of the checkpoint of step {step} within "
                    f"{self._timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
        (folder / "state.json").write_text(json.dumps({"step": step, "layout": self._layout}), encoding="utf-8")
        sync_to_disk(folder / "state.json")
        sync_to_disk(folder)
        folder.rename(self._folder / _name(step))
        sync_to_disk(self._folder)
        for old in _steps(self._folder)[:-KEEP]:
            shutil.rmtree(self._folder / _name(old), ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if _FOLDER.fullmatch(path.name))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"
