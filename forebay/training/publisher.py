"""Snapshots written and announced while training goes on.

Invariants:
- There is one in the making at most: before the next one's weights are gathered, `wait`. So beside the trainer's own
  memory there is one copy of the model, on rank 0's CPU, and each shard of it goes as soon as it is on the disk.
- A snapshot is announced when all of it is on the disk, never before.
- What went wrong with one is raised by the next call.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from forebay.control.types import Snapshot
from forebay.training.snapshots import SnapshotWriter, prune

Shard = Sequence[tuple[str, Tensor]]


class Publisher:
    """Rank 0's. `announce` is called in a thread of its own."""

    def __init__(self, writer: SnapshotWriter, announce: Callable[[Snapshot], None]) -> None:
        self._writer, self._announce = writer, announce
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending: Future[None] | None = None

    @property
    def pending(self) -> Future[None] | None:
        """Of the snapshot handed over last; it may be done."""
        return self._pending

    def publish(self, folder: Path, version: int, shards: list[Shard]) -> None:
        """Write the weights of `version`, keep the newest snapshots only, and announce it. `shards` must be copies, and
        are taken out of the list one by one."""
        self.wait()
        self._pending = self._thread.submit(self._publish, folder, version, shards)

    def repeat(self, snapshot: Snapshot) -> None:
        """Announce one that is on the disk already."""
        self.wait()
        self._pending = self._thread.submit(self._announce, snapshot)

    def check(self) -> None:
        """Raise what went wrong so far; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Until nothing is in the making; raises what went wrong."""
        if self._pending is not None:
            self._pending.result()

    def _publish(self, folder: Path, version: int, shards: list[Shard]) -> None:
        snapshot = self._writer.write(folder, version, _taken(shards))
        prune(folder.parent)
        self._announce(snapshot)


def _taken(shards: list[Shard]) -> Iterator[Shard]:
    while shards:
        yield shards.pop(0)
