"""What the benchmarks compute from what they measured; the controller benchmark in small."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import control, data, modes
from benchmarks.alone import _add
from forebay.config import RunConfig, StorageConfig
from forebay.control.controller import Rules
from forebay.control.recorder import Recorder
from forebay.control.types import Fate
from forebay.run import RunContext
from forebay.telemetry.ledger import FILE, account, read_ledger

SMALL = Rules(
    steps=45,
    batch_groups=8,
    group_size=control.GROUP_SIZE,
    sync_every=1,
    max_staleness=control.BATCHES_AHEAD,
    work_in_progress=control.BATCHES_AHEAD,
    max_concurrent_samples=16,
)


def test_the_controller_benchmark_settles_every_group_and_counts_what_it_did(tmp_path: Path) -> None:
    with contextlib.closing(Recorder(tmp_path, lambda record: None)) as recorder:
        drive = control.Drive(SMALL, 4, recorder)
        drive.run()
    rows, result = control.outcome(drive)
    fates = drive.controller.ledger.fates()
    assert fates["admitted"] == fates["trained"] + fates["filtered"] == 45 * 8
    summed = account(read_ledger(tmp_path / FILE))
    assert {part.fate: part.groups for part in summed.fates} == {fate.value: fates[fate] for fate in Fate}
    assert (summed.admitted, summed.in_flight) == (45 * 8, 0)
    # Marks 16 to 39 of 46: steps 17 to 39, of 8 groups each.
    assert result["groups"] == 23 * 8
    assert 4 * 16 <= result["concurrent_samples"] < 4 * (16 + control.GROUP_SIZE)
    assert {"groups_per_s", "us_per_event", "rss_growth_mb"} <= result.keys()
    assert {row["call"]: row["calls"] for row in rows}["generated"] == 45 * 8


def test_steady_steps_leave_out_both_ends(tmp_path: Path) -> None:
    run = RunContext.create(RunConfig(storage=StorageConfig(scratch=str(tmp_path))))
    # Ends of steps 1 to 10: slow while the pipeline fills, quick while it drains, one second in between.
    ends = [10.0, 20.0, 30.0, 31.0, 32.0, 33.0, 34.0, 34.1, 34.2, 34.3]
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": i + 1, "t": t, "train_wait_s": 0.25, "tokens_generated": 100 * (i + 1)}
        for i, t in enumerate(ends)
    ]
    records += [
        {"kind": "queue", "t": t, "in_flight": n} for t, n in [(5, 0), (30.5, 8), (31.5, 0), (33.5, 4), (34.1, 0)]
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert modes.steady(run) == {
        "step_time_s": 1.0,
        "train_wait_ratio": 0.25,
        "engines_idle_ratio": pytest.approx(1 / 3),
        "tokens_per_s": 100.0,
        "tokens_per_step": 100.0,
        "in_flight_groups": 4.0,
    }


def test_the_ratios_are_of_one_round_and_the_median_over_the_rounds_counts() -> None:
    measured = {
        "quickstart": {"sync": 1.0, "one_step_off": 0.8, "fully_async": 0.63, "generate_only": 0.6, "train_only": 0.2},
        "own_cores": {"sync": 1.1, "fully_async": 0.7, "generate_only": 0.5, "train_only": 0.68},
        "own_cores_retract": {"fully_async": 0.75, "generate_only": 0.5, "train_only": 0.3},
        "balanced": {"sync": 1.2, "fully_async": 0.6, "generate_only": 0.5, "train_only": 0.55},
    }
    rows = [
        {
            "setting": setting,
            "what": what,
            "round": turn,
            "step_time_s": factor * seconds * (slower if (setting, what) == ("own_cores", "fully_async") else 1),
            "train_wait_ratio": 0.5,
            "engines_idle_ratio": 0,
            "work_over_cores_s": 0.5,
        }
        for turn, (factor, slower) in enumerate([(1.0, 1.0), (0.9, 1.1), (5.0, 0.5)])
        for setting, own in measured.items()
        for what, seconds in own.items()
    ]
    result = modes.outcome(rows)
    expected = measured | {"own_cores": measured["own_cores"] | {"fully_async": pytest.approx(0.7)}}
    assert result["step_time_s"] == expected
    assert result["fully_async_over_bound_rounds"] == pytest.approx([0.7 / 0.68, 1.1 * 0.7 / 0.68, 0.5 * 0.7 / 0.68])
    assert result["fully_async_over_bound"] == pytest.approx(0.7 / 0.68)
    assert result["fully_async_over_bound_retract"] == pytest.approx(0.75 / 0.5)
    assert result["fully_async_over_bound_shared_cores"] == pytest.approx(0.63 / 0.6)
    assert result["sync_over_fully_async_own_cores"] == pytest.approx(1.1 / 0.7)
    assert result["sync_over_fully_async_balanced"] == pytest.approx(2.0)
    assert result["generate_over_train_balanced"] == pytest.approx(0.5 / 0.55)
    assert result["fully_async_over_work"] == pytest.approx(0.63 / 0.5)


def test_work_over_cores_is_of_the_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    # CPU seconds at the ends of steps 1 to 10: three between two steady ones.
    assert modes.work_over_cores([0, 50, 100, 103, 106, 109, 112, 200, 300, 400]) == pytest.approx(3 / 4)


def test_cpu_seconds_count_children() -> None:
    before = modes.cpu_seconds()
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = modes.cpu_seconds() - before
        child.kill()
    assert 0.25 < used < 5


def test_a_batch_recorded_in_parts_is_whole_and_has_each_group_once() -> None:
    batches: dict[int, dict[str, Any]] = {}
    for groups, complete in ([1, 2], False), ([2], False), ([3], True):
        part = {"step": 7, "version": 6, "groups": [{"group_id": i} for i in groups], "complete": complete}
        _add(batches, part)
    whole = {"step": 7, "version": 6, "groups": [{"group_id": i} for i in (1, 2, 3)], "complete": True}
    assert batches == {7: whole}


def test_the_data_benchmark_judges_every_math_answer_and_counts_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, result = data.answers(0.0)
    assert [row["rows"] for row in rows] == [len(data.MATH), rows[1]["rows"], len(data.MATH) - rows[1]["rows"]]
    assert rows[1]["rows"] >= 40
    assert result["math_answers_per_s"] > 0
    assert result["stalls"] == 0
    monkeypatch.setattr(data, "SECONDS", -1.0)
    assert data.answers(0.0)[1]["stalls"] == len(data.MATH)


def test_the_data_benchmark_prepares_a_file_whose_account_is_known(tmp_path: Path) -> None:
    data.write_rows(tmp_path / "rows.jsonl", 2000)
    data.stage(tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["seconds"] > 0
    counts = told["counts"]
    assert (counts["read"], counts["quarantined"], counts["duplicates"]) == (2000, 20, 199)
    assert counts["test"] == 512
    assert data._resident(os.getpid()) > 10e6
