"""`forebay ledger`: the account of a run from its file, wherever it lies."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from forebay.cli import app
from forebay.control.recorder import LEDGER
from forebay.storage.store import Store
from forebay.telemetry.ledger import FILE, account, read_ledger

STALE = "3 versions old, the bound is 2"


def row(group_id: int, fate: str = "trained", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "group_id": group_id,
        "prompt_id": f"p{group_id}",
        "engines": [group_id % 2],
        "fate": fate,
        "reason": "",
        "attempts": 1,
        "admitted_t": float(group_id),
        "finished_t": group_id + 2.0,
        "settled_t": group_id + 5.0,
        "tokens": 30,
        "lengths": [10, 20],
        "predicted_length": 14.5,
        "reward_mean": 0.5,
        "rewards": [0.0, 1.0],
        "oldest_version": 3,
        "newest_version": 4,
        "mean_version": 3.25,
        "trained_version": 5,
        "staleness": 2,
    }
    untrained = {"trained_version": None, "staleness": None} if fate != "trained" else {}
    return values | untrained | changes


ROWS = [
    row(4, staleness=0, engines=[0, 1], attempts=2),  # not in order: groups end as they like
    row(0),
    row(1, "filtered", reason="all rewards are equal", reward_mean=1.0),
    row(2, "stale", reason=STALE),
    row(6, "stale", reason=STALE),
    row(5, "failed", reason="no [such] cell", tokens=0, lengths=[], rewards=[], reward_mean=None, finished_t=None),
]


def write(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=LEDGER), folder / FILE)
    return folder


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return "\n".join(" ".join(line.split()) for line in result.stdout.splitlines())


def refused(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.exit_code, result.stderr.strip()


def test_the_account_adds_up_with_groups_in_flight(tmp_path: Path) -> None:
    summed = account(read_ledger(write(tmp_path) / FILE))
    groups = {part.fate: part.groups for part in summed.fates}
    assert groups == {"trained": 2, "filtered": 1, "stale": 2, "failed": 1}
    assert (summed.admitted, summed.in_flight) == (7, 1)
    assert sum(groups.values()) + summed.in_flight == summed.admitted
    assert [part.tokens for part in summed.fates] == [60, 30, 60, 0]
    assert [part.reward_mean for part in summed.fates] == [0.5, 1.0, 0.5, None]
    assert summed.reasons[0] == ("stale", STALE, 2)
    assert summed.staleness == [(0, 1), (2, 1)]
    assert summed.attempts == [(1, 5), (2, 1)]
    assert summed.engines == [(0, 4), (1, 3)]
    assert (summed.generating_s, summed.queued_s) == (2.0, 3.0)


def test_the_command_prints_it(tmp_path: Path) -> None:
    text = shown(write(tmp_path))
    for line in (
        "trained │ 2 │ 60 │ 0.500",
        "failed │ 1 │ 0 │ -",
        "in flight at the end │ 1 │ - │ -",
        "admitted │ 7 │ 150 │ -",
        "staleness of trained groups 0: 1, 2: 1 (mean 1.00)",
        "attempts 1: 5, 2: 1",
        f"stale 2 x {STALE}",
        "failed 1 x no [such] cell",
    ):
        assert line in text, line


def test_one_group_with_every_column(tmp_path: Path) -> None:
    lines = shown(write(tmp_path), "--group", 4).splitlines()
    assert [line.split()[0] for line in lines] == LEDGER.names
    assert "engines 0, 1" in lines
    assert "mean_version 3.25" in lines
    assert "reason -" in lines
    assert refused(tmp_path, "--group", 3)[0] == 2
    assert "group 3 has no fate in this ledger (ids go from 0 to 6" in refused(tmp_path, "--group", 3)[1]


def test_a_run_is_found_by_id_in_scratch_and_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path(".forebay/runs/here"))
    Store("file://runs").publish_tree(write(tmp_path / "made"), "there")
    profile = tmp_path / "profile.yaml"
    profile.write_text("storage: {uri: 'file://elsewhere'}")
    Store("file://elsewhere").publish_tree(tmp_path / "made", "far")
    assert shown("here") == shown("there") == shown("far", "--profile", profile) == shown(tmp_path / "made" / FILE)
    code, line = refused("far")
    assert code == 2
    assert line.startswith("forebay: far: no such folder, no such run under .forebay/runs, and none published in")
    assert refused("runs/none")[0] == 2


def test_a_tree_without_a_ledger_and_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "other").write_text("x")
    Store("file://runs").publish_tree(tmp_path / "bare", "early")
    assert refused("early") == (2, "forebay: file://runs/early: has no ledger.parquet")
    assert refused("bare")[0] == 2
    whole = (write(tmp_path / "whole") / FILE).read_bytes()
    middle = len(whole) // 4
    for damaged in (b"PAR1 cut off", b"", whole[: len(whole) // 2], whole[:middle] + bytes(64) + whole[middle + 64 :]):
        (tmp_path / "bare" / FILE).write_bytes(damaged)
        code, line = refused("bare")
        assert code == 2
        assert line.startswith(f"forebay: bare/{FILE}: cannot be read as Parquet, so it is damaged or not a ledger")
    Store("file://runs").publish_tree(write(tmp_path / "good"), "spoilt")
    (tmp_path / "runs" / "spoilt" / FILE).write_bytes(b"other bytes")
    assert "damaged" in refused("spoilt")[1]


def test_a_file_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    code, line = refused(write(tmp_path / "twice", [*ROWS, row(4, "stale")]))
    assert code == 1
    assert "two fates" in line
    assert "'lost'" in refused(write(tmp_path / "lost", [row(0, "lost")]))[1]
    (tmp_path / "other").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS, schema=LEDGER).drop(["mean_version"]), tmp_path / "other" / FILE)
    assert refused(tmp_path / "other") == (
        2,
        f"forebay: {tmp_path}/other/{FILE}: is not a ledger, or one of another version: it has no column mean_version",
    )


def test_an_empty_ledger_has_an_account(tmp_path: Path) -> None:
    empty = pa.Table.from_pylist([], schema=LEDGER)
    pq.write_table(empty, tmp_path / FILE)
    assert "admitted │ 0 │ 0 │ -" in shown(tmp_path)


def test_set_needs_a_profile(tmp_path: Path) -> None:
    assert refused(write(tmp_path), "--set", "seed=1") == (2, "forebay: --set changes a profile: name one")
