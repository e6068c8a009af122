"""What a simulation says while it lasts: on stderr only, and what is true."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.simulation import progress as module
from forebay.simulation.plan import make_plan
from forebay.simulation.progress import Progress, shown
from forebay.simulation.run import simulate
from tests.unit.test_plan import profile
from tests.unit.test_simulation import make_scenario

PROFILE = Path(__file__).resolve().parents[2] / "profiles" / "quickstart_cpu.yaml"


def test_a_simulation_tells_how_far_it_is() -> None:
    told = Progress("")
    told.begin("simulating", 12)
    assert str(told) == "simulating: step 1 of 12, 0 groups generated"
    result = simulate(make_scenario(), progress=told)
    assert told.done == 12
    trained, admitted = result.fates["trained"], result.fates["admitted"]
    assert trained <= told.groups <= admitted
    assert str(told) == f"simulating: step 12 of 12, {told.groups:,} groups generated"


def test_a_plan_tells_which_choice_it_is_at() -> None:
    told = Progress("")
    made = make_plan(profile(), 2, progress=told)
    assert re.fullmatch(rf"simulating choice {len(made.lines)} \(1 \+ 1, fully_async, \w+\)", told.doing)
    assert told.done == told.steps >= made.steps


def test_without_a_terminal_it_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.05)
    with shown("reading") as told:
        time.sleep(0.2)
        told.begin("simulating", 3)
        told.groups = 1234
        time.sleep(0.2)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert 4 <= len(lines) <= 8
    assert lines[0] == "forebay: reading (0 s)"
    assert lines[-1] == "forebay: simulating: step 1 of 3, 1,234 groups generated (0 s)"


def test_what_is_quick_says_nothing_and_errors_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), shown("reading"):
        raise KeyError
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_is_one_line_that_goes_again_and_stdout_is_for_results() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "simulate", str(PROFILE)]
    changes = ["--set", "control.batch_groups=512", "--steps", "12"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([*command, *changes], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown_there = b""
    while True:
        try:
            shown_there += os.read(ours, 65536)
        except OSError:  # all is read, and the other end is closed
            break
    os.close(ours)
    results = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    text = shown_there.decode()
    assert re.search(r"simulating: step \d+ of 12, [\d,]+ groups generated", text)
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in text[-40:], "the line is taken away"
    assert b"step time" in results
    assert b"groups generated" not in results
