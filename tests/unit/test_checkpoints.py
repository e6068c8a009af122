"""Checkpoints as files; tests/integration/test_trainer.py has the trainer that goes on from one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from forebay.errors import DeadlineError, RunError
from forebay.training.checkpoints import Checkpoints
from forebay.training.distributed import Ranks

LAYOUT: dict[str, int | str] = {"zero_stage": 2, "dtype": "float32"}


@dataclass
class Alone:
    """`Ranks` whose fellows are elsewhere."""

    rank: int = 0
    world: int = 1

    def sum(self, values: Tensor) -> Tensor:
        return values


def make(folder: Path, *, rank: int = 0, world: int = 1, timeout_s: float = 10, **layout: Any) -> Checkpoints:
    return Checkpoints(folder, cast(Ranks, Alone(rank, world)), LAYOUT | layout, timeout_s)


def state(value: float) -> dict[str, Tensor]:
    return {"0.master": torch.full((3,), value), "0.step": torch.tensor(value)}


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    assert checkpoints.load() is None
    assert checkpoints.finished() is None
    for step in (2, 4, 100_000_000):
        checkpoints.save(step, state(step))
        checkpoints.wait()
        assert checkpoints.finished() == step
        assert checkpoints.finished() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-100000000"]
    loaded = make(tmp_path).load()
    assert loaded is not None
    assert loaded[0] == 100_000_000
    assert all(torch.equal(loaded[1][name], tensor) for name, tensor in state(100_000_000).items())
    assert loaded[1].keys() == state(0).keys()


def test_every_rank_has_its_part_and_completeness_waits_for_the_last(tmp_path: Path) -> None:
    leader, other = make(tmp_path, world=2), make(tmp_path, rank=1, world=2)
    leader.save(3, state(1))
    assert leader.finished() is None
    assert make(tmp_path, rank=1, world=2).load() is None
    other.save(3, state(2))
    leader.wait()
    assert leader.finished() == 3
    for checkpoints, value in ((leader, 1), (other, 2)):
        loaded = checkpoints.load()
        assert loaded is not None
        assert torch.equal(loaded[1]["0.master"], state(value)["0.master"])


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, world=2, timeout_s=0.1)
    checkpoints.save(3, state(1))
    with pytest.raises(DeadlineError, match=r"ranks \[1\] did not write their part of the checkpoint of step 3"):
        checkpoints.wait()
    assert make(tmp_path, world=2).load() is None
    assert list(tmp_path.iterdir()) == []  # what was left half done is gone at the next start


def test_a_failure_in_the_background_is_raised(tmp_path: Path) -> None:
    checkpoints = make(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    checkpoints.save(3, state(1))
    with pytest.raises(RunError, match="cannot write the checkpoint of step 3"):
        checkpoints.save(4, state(1))


@pytest.mark.parametrize("change", [{"zero_stage": 3}, {"dtype": "bfloat16"}, {"world": 2}])
def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    checkpoints = make(tmp_path)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    with pytest.raises(RunError, match="was made with"):
        make(tmp_path, **change).load()


@pytest.mark.parametrize("file", ["state.json", "rank-0.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str) -> None:
    checkpoints = make(tmp_path)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    (tmp_path / "step-00000001" / file).write_bytes(b"x")
    with pytest.raises(RunError, match="step-00000001 cannot be read"):
        make(tmp_path).load()
