"""The Training Queue: finished groups, oldest first, and the batches that the trainer takes from it.

Invariants:
- A group is queued, or in the batch being formed, or in none; it is handed to one batch only.
- A batch can be asked for again until it lies in a checkpoint: the trainer may die and come back.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from forebay.control.groups import Batch, Group


@dataclass(slots=True)
class Forming:
    """A batch that the trainer takes as it comes, or that is complete."""

    step: int
    version: int
    slots: int
    teaching: list[Group] = field(default_factory=list)
    skipped: list[Group] = field(default_factory=list)
    """In the batch, but without reward spread."""

    @property
    def taken(self) -> int:
        return len(self.teaching) + len(self.skipped)

    @property
    def complete(self) -> bool:
        return self.taken == self.slots

    def take(self, group: Group) -> None:
        group.trained_version = self.version
        (self.teaching if group.teaches else self.skipped).append(group)

    def batch(self) -> Batch:
        return Batch(self.step, self.version, tuple(self.teaching), tuple(self.skipped))


class TrainingQueue:
    """A heap by (oldest version, group id), so that what goes stale first lies on top."""

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._heap: list[tuple[int, int, Group]] = []
        self._replay: dict[int, Batch] = {}
        self.forming: Forming | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, group: Group) -> None:
        heapq.heappush(self._heap, (group.oldest_version, group.group_id, group))

    def pop_stale(self, version: int, bound: int) -> Iterator[Group]:
        """Remove and yield the groups that `version` must not train."""
        while self._heap and version - self._heap[0][0] > bound:
            yield heapq.heappop(self._heap)[2]

    def form(self, step: int, version: int) -> Forming:
        """The batch of `step`, as far as it has come; a new one if there is none."""
        if self.forming is None or self.forming.step != step:
            self.forming = Forming(step, version, self._batch_groups)
        return self.forming

    def fill(self, forming: Forming, keep: int = 0) -> Iterator[Group]:
        """Move groups into the batch, oldest first, until all but `keep` places are taken or the queue is empty;
        yields them."""
        while self._heap and forming.taken < forming.slots - keep:
            group = heapq.heappop(self._heap)[2]
            forming.take(group)
            yield group

    def trained(self, batch: Batch) -> None:
        """The batch is done; it stays to be asked for again."""
        self.forming = None
        self._replay[batch.step] = batch

    def again(self, step: int) -> Batch | None:
        """A batch that was trained before, while it is in no checkpoint."""
        return self._replay.get(step)

    def checkpointed(self, step: int) -> None:
        """Batches up to `step` are not asked for again."""
        self._replay = {number: batch for number, batch in self._replay.items() if number > step}
