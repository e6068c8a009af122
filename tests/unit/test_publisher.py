"""The publisher's promises, with a writer and a Control Unit that stand still when told to."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from forebay.control.types import Snapshot
from forebay.errors import RunError
from forebay.training.publisher import Publisher, Shard

DEADLINE_S = 20


class Writer:
    """Writes nothing; stands before each shard until it is let go."""

    def __init__(self, error: str = "") -> None:
        self.go, self.error = threading.Event(), error
        self.written: list[int] = []
        self.left: list[int] = []
        """Shards that are still held when one is written."""
        self.shards: list[Shard] = []

    def write(self, folder: Path, version: int, shards: Iterable[Shard]) -> Snapshot:
        assert self.go.wait(DEADLINE_S)
        for _ in shards:
            self.left.append(len(self.shards))
        if self.error:
            raise RunError(self.error)
        folder.mkdir(parents=True)
        self.written.append(version)
        return Snapshot(version, str(folder), "digest")


def shards(count: int = 3) -> list[Shard]:
    return [[(f"weight {i}", torch.zeros(2))] for i in range(count)]


def test_training_goes_on_and_the_announcement_waits_for_the_disk(tmp_path: Path) -> None:
    writer, heard = Writer(), list[int]()
    publisher = Publisher(writer, lambda snapshot: heard.append(snapshot.version))  # type: ignore[arg-type]
    publisher.publish(tmp_path / "v00000001", 1, shards())
    publisher.check()
    assert (writer.written, heard) == ([], [])
    writer.go.set()
    publisher.wait()
    assert (writer.written, heard) == ([1], [1])
    publisher.repeat(Snapshot(2, "there already", "digest"))
    publisher.wait()
    assert (writer.written, heard) == ([1], [1, 2])


def test_one_copy_of_the_model_at_most_and_less_with_each_shard(tmp_path: Path) -> None:
    writer, heard = Writer(), list[int]()
    publisher = Publisher(writer, lambda snapshot: heard.append(snapshot.version))  # type: ignore[arg-type]
    writer.shards = first = shards()
    publisher.publish(tmp_path / "v00000001", 1, first)
    late = threading.Thread(target=publisher.publish, args=(tmp_path / "v00000002", 2, shards()))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    assert len(first) == 3
    writer.go.set()
    late.join(DEADLINE_S)
    publisher.wait()
    assert heard == [1, 2]
    assert writer.left[:3] == [2, 1, 0]


def test_what_goes_wrong_is_raised_by_the_next_call(tmp_path: Path) -> None:
    writer, heard = Writer("cannot write the weights of version 1: no space left"), list[int]()
    publisher = Publisher(writer, lambda snapshot: heard.append(snapshot.version))  # type: ignore[arg-type]
    publisher.publish(tmp_path / "v00000001", 1, shards())
    writer.go.set()
    for call in (publisher.wait, publisher.check, lambda: publisher.publish(tmp_path / "v00000002", 2, shards())):
        with pytest.raises(RunError, match="no space left"):
            call()
    assert heard == []
