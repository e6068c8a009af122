"""The owner's handle on the trainer's process when a run ends early, with a few lines in the trainer's place."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay import train as stage
from forebay.config import parse_config
from forebay.control.recorder import Recorder
from forebay.errors import DeadlineError, RunError
from forebay.run import RunContext

RECORDS = """
import pathlib, sys, time
time.sleep(0.3)
pathlib.Path(sys.argv[1]).write_text('{"steps": %d, "reason": "the run is over"}')
"""
DIES = "raise SystemExit(1)"
HANGS = "import time; time.sleep(60)"


def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[str, RunContext]:
    values = {"storage": {"scratch": str(tmp_path)}, "training": {"step_timeout_s": 1.0}}
    run = RunContext.create(parse_config(values, "test"))
    command = [sys.executable, "-S", "-c", script, str(run.root / "trainer_done.json")]
    monkeypatch.setattr(stage, "trainer_command", lambda *_: (command, {}, run.root))
    with (
        contextlib.closing(Recorder(run.root, lambda record: None)) as recorder,
        stage.Trainer(run, "http://nowhere", None, recorder) as trainer,
    ):
        return asyncio.run(trainer.last_checkpoint()), run


@pytest.mark.parametrize(("steps", "says"), [(7, "the trainer's checkpoint of step 7 is in {}"), (0, "")])
def test_what_was_trained_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, says: str) -> None:
    words, run = last_words(tmp_path, monkeypatch, RECORDS % steps)
    assert words == says.format(run.checkpoints)


def test_a_dead_trainer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, _ = last_words(tmp_path, monkeypatch, DIES)
    assert words == ""


def test_a_trainer_that_hangs_is_waited_for_as_long_as_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    words, _ = last_words(tmp_path, monkeypatch, HANGS)
    assert words == "the trainer did not write a last checkpoint within 1 s (training.step_timeout_s)"
    assert 1 <= time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("error", "holds", "seen", "asked"),
    [
        (RunError("no restart is left"), None, True, True),
        (RunError("no restart is left"), 3, True, True),
        (DeadlineError("no progress"), None, True, True),
        (DeadlineError("the trainer holds step 3"), 3, True, False),
        (RunError("no restart is left"), None, False, False),
    ],
)
def test_the_error_that_ends_a_run_names_the_checkpoint(
    error: RunError, holds: int | None, seen: bool, asked: bool
) -> None:
    """Not if nothing was trained yet, nor if it is the trainer that everyone waited for."""

    async def last_checkpoint() -> str:
        return "the checkpoint is there"

    unit = SimpleNamespace(controller=SimpleNamespace(training_step=holds), trainer_seen=seen)
    ended = asyncio.run(stage._ended_early(error, unit, SimpleNamespace(last_checkpoint=last_checkpoint)))
    assert type(ended) is type(error)
    assert str(ended) == (f"{error}; the checkpoint is there" if asked else str(error))


def test_a_run_that_taught_nothing_is_no_success() -> None:
    with pytest.raises(RunError, match="none of 48 groups had rewards that differ"):
        stage.refuse_untaught({"admitted": 48, "trained": 0, "filtered": 48, "stale": 0, "failed": 0, "in_flight": 0})
    stage.refuse_untaught({"admitted": 48, "trained": 1, "filtered": 47, "stale": 0, "failed": 0, "in_flight": 0})
