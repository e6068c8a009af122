"""The schedule's files: made once, read back as they were written, refused when they are not what they were."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import forebay.data.prepare
import forebay.doctor
import forebay.lengths.stage
from forebay import cli
from forebay.config import RunConfig, ScheduleConfig, StorageConfig
from forebay.control.recorder import LEDGER
from forebay.errors import UserError
from forebay.run import RunContext
from forebay.scheduling.batch_groups import variation
from forebay.scheduling.policies import make_order
from forebay.scheduling.quality import true_variation
from forebay.scheduling.schedule import FILE, MANIFEST, make_schedule, read_schedule, write_schedule


def make_run(tmp_path: Path, predicted: Any, ids: list[str] | None = None, **changes: Any) -> RunContext:
    columns = {"prompt_id": ids or [f"p{i:04d}" for i in range(len(predicted))], "predicted": predicted}
    storage = StorageConfig(uri=f"file://{tmp_path}/runs", scratch=str(tmp_path / "scratch"))
    run = RunContext.create(RunConfig(storage=storage, **changes))
    run.lengths.mkdir()
    pq.write_table(pa.table(columns), run.lengths / "predictions.parquet")
    return run


def lengths(count: int) -> list[float]:
    return np.random.default_rng(0).lognormal(5, 0.8, count).tolist()


@settings(deadline=None, max_examples=40)
@given(
    predicted=st.lists(st.floats(0.5, 1e5), min_size=1, max_size=60),
    policy=st.sampled_from(("fifo", "asp", "balanced", "longest_first")),
    seed=st.integers(0, 99),
)
def test_a_schedule_survives_its_file(predicted, policy, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    order = make_order(np.array(predicted), None, ScheduleConfig(policy=policy), "sync", 8, seed)
    ids = [f"prompt {i}" for i in range(len(predicted))]
    write_schedule(folder, pa.array(ids), np.array(predicted), order, {}, {})
    expected = [[[(ids[i], predicted[i]) for i in minibatch] for minibatch in group] for group in order.nested()]
    assert read_schedule(folder / FILE) == expected


def test_a_schedule_is_made_once_for_the_same_predictions_and_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path, lengths(100))
    first = make_schedule(run)
    written = (run.schedule / FILE).stat().st_mtime_ns
    assert make_schedule(run) == first
    assert (run.schedule / FILE).stat().st_mtime_ns == written
    manifest = json.loads((run.schedule / MANIFEST).read_text())
    assert (manifest["policy"], manifest["seed"], manifest["prompts"]) == ("balanced", 0, 100)
    assert manifest["settings"]["minibatch_prompts"] == 4
    assert re.fullmatch("[0-9a-f]{64}", manifest["made_from"]["predictions.parquet"])
    assert re.fullmatch("[0-9a-f]{64}", manifest["sha256"][FILE])
    assert sum(len(m) for group in read_schedule(run.schedule / FILE) for m in group) == first.prompts == 100


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"schedule": ScheduleConfig(policy="asp")}, {"mode": "sync"}, {"predicted": True}]
)
def test_other_predictions_or_settings_make_it_again(tmp_path: Path, change: dict[str, Any]) -> None:
    run = make_run(tmp_path, lengths(100))
    make_schedule(run)
    before = read_schedule(run.schedule / FILE)
    if change.pop("predicted", None):
        table = pa.table({"prompt_id": [f"p{i:04d}" for i in range(100)], "predicted": lengths(101)[1:]})
        pq.write_table(table, run.lengths / "predictions.parquet")
    run = RunContext(run.config.model_copy(update=change), run.run_id, run.scratch, run.token)
    make_schedule(run)
    after = read_schedule(run.schedule / FILE)
    assert after != before
    assert sorted(i for g in after for m in g for i, _ in m) == sorted(i for g in before for m in g for i, _ in m)


def test_a_changed_file_is_refused_in_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, lengths(50))
    make_schedule(run)
    path = run.schedule / FILE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for call in (lambda: read_schedule(path), lambda: make_schedule(run)):
        with pytest.raises(
            UserError, match=r"^[^\n]*schedule\.parquet: is not the file that manifest\.json names[^\n]*$"
        ):
            call()


@pytest.mark.parametrize("manifest", [None, "{", '{"format": 0}'])
def test_a_schedule_without_its_manifest_is_not_read(tmp_path: Path, manifest: str | None) -> None:
    run = make_run(tmp_path, lengths(50))
    make_schedule(run)
    (run.schedule / MANIFEST).unlink()
    if manifest:
        (run.schedule / MANIFEST).write_text(manifest)
    with pytest.raises(UserError, match=r"^[^\n]*(make the schedule again|remove [^\n]* made again)$"):
        read_schedule(run.schedule / FILE)


@pytest.mark.parametrize(
    ("predicted", "ids", "said"),
    [
        (
            [1.0, float("nan"), float("nan")],
            None,
            "prompt p0001 has the predicted length nan .and 1 others like it.*more",
        ),
        ([1.0, float("inf")], None, "prompt p0001 has the predicted length inf"),
        ([-3.0, 2.0], None, "prompt p0000 has the predicted length -3"),
        ([0.0, 2.0], None, "prompt p0000 has the predicted length 0"),
        ([1.0, None], None, "prompt p0001 has the predicted length nan"),
        ([1.0, 2.0, 3.0], ["a", "b", "a"], "prompt a is there 2 times"),
        ([1.0, 2.0], ["a", None], "row 1 has no prompt_id"),
        (["x", "y"], None, "column predicted has type string"),
        ([], [], "no prompts to schedule"),
    ],
)
def test_predictions_that_make_no_sense_give_one_line(tmp_path: Path, predicted: Any, ids: Any, said: str) -> None:
    run = make_run(tmp_path, predicted, ids)
    with pytest.raises(UserError, match=rf"^[^\n]*predictions\.parquet: [^\n]*{said}[^\n]*$"):
        make_schedule(run)


def test_files_that_are_missing_or_something_else_give_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1.0], schedule=ScheduleConfig(load="kv_area"))
    path = run.lengths / "predictions.parquet"
    with pytest.raises(UserError, match="has no column prompt_tokens; it has prompt_id, predicted"):
        make_schedule(run)
    path.write_text("prompt_id,predicted\n")
    with pytest.raises(UserError, match=r"^[^\n]*cannot be read as Parquet[^\n]*$"):
        make_schedule(run)
    path.unlink()
    with pytest.raises(UserError, match="there is no such file"):
        make_schedule(run)


def test_fewer_prompts_than_a_batch_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"control.batch_groups \(16\) is more than the 3 prompts of the tr"):
        make_schedule(make_run(tmp_path, [7.3] * 3))


def test_one_minibatch_of_equal_lengths_works(tmp_path: Path) -> None:
    for policy in ("fifo", "asp", "balanced", "longest_first"):
        schedule = ScheduleConfig(policy=policy, minibatch_prompts=3, minibatch_slack=0)
        run = make_run(tmp_path, [7.3] * 3, schedule=schedule, control={"batch_groups": 3})
        result = make_schedule(run)
        assert (result.prompts, result.minibatches) == (3, 3 if policy == "longest_first" else 1)
        assert result.batch_groups == 1
        assert result.utilisation == pytest.approx(1.0)
        assert result.load_variation == 0.0


# ---- how even it was


def write_ledger(run: RunContext, rows: list[dict[str, Any]]) -> None:
    full = [dict.fromkeys(LEDGER.names) | {"group_id": i, "fate": "trained"} | row for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(full, schema=LEDGER), run.root / "ledger.parquet")


def test_the_predicted_load_variation_is_that_of_the_batch_groups(tmp_path: Path) -> None:
    run = make_run(tmp_path, lengths(250), schedule=ScheduleConfig(policy="fifo"))
    result = make_schedule(run)
    groups = read_schedule(run.schedule / FILE)
    loads = [sum(length for minibatch in group for _, length in minibatch) for group in groups]
    assert len(loads) == 16
    assert result.load_variation == pytest.approx(variation(loads[:-1]))  # the last one is smaller than the others
    in_order = sorted(lengths(250))
    assert result.sorted_variation == pytest.approx(variation([sum(in_order[i : i + 16]) for i in range(0, 240, 16)]))
    assert 0.1 < result.random_variation < 0.6


def test_the_true_load_variation_counts_whole_batch_groups_once(tmp_path: Path) -> None:
    schedule = ScheduleConfig(minibatch_prompts=2, period_minibatches=2)
    run = make_run(tmp_path, [10.0] * 12, schedule=schedule, control={"batch_groups": 4})
    make_schedule(run)
    groups = [[i for minibatch in group for i, _ in minibatch] for group in read_schedule(run.schedule / FILE)]
    assert [len(group) for group in groups] == [4, 4, 4]
    assert true_variation(run) is None
    rows = [{"prompt_id": i, "lengths": [10, 30]} for i in groups[0]]
    write_ledger(run, rows)
    assert true_variation(run) is None
    rows += [{"prompt_id": i, "lengths": [60]} for i in groups[1]]
    rows += [{"prompt_id": groups[1][0], "lengths": [20]}]  # answered again: mean 40
    rows += [{"prompt_id": i, "lengths": [500]} for i in groups[2][:3]]
    rows += [{"prompt_id": groups[2][3], "lengths": [], "fate": "failed"}]
    write_ledger(run, rows)
    found = true_variation(run)
    assert found is not None
    assert found.scheduled == pytest.approx(variation([4 * 20, 3 * 60 + 40]))


def test_the_true_kv_area_is_of_prompt_and_responses(tmp_path: Path) -> None:
    schedule = ScheduleConfig(minibatch_prompts=1, period_minibatches=1, minibatch_slack=0, load="kv_area")
    run = make_run(tmp_path, [10.0, 10.0], schedule=schedule, control={"batch_groups": 2})
    table = {
        "prompt_id": ["p0000", "p0001"],
        "predicted": [10.0, 10.0],
        "prompt_tokens": pa.array([100, 1], pa.int32()),
    }
    pq.write_table(pa.table(table), run.lengths / "predictions.parquet")
    make_schedule(run)
    write_ledger(run, [{"prompt_id": "p0000", "lengths": [2, 4]}, {"prompt_id": "p0001", "lengths": [10, 10]}])
    found = true_variation(run)
    assert found is not None
    assert found.scheduled == pytest.approx(variation([(200 + 2 + 400 + 8) / 2, 10 + 50]))


# ---- the command


def test_the_command_prints_what_was_made_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def predict(run: RunContext) -> None:
        called.append("predict_lengths")
        run.lengths.mkdir()
        table = {"prompt_id": [f"p{i}" for i in range(200)], "predicted": lengths(200)}
        pq.write_table(pa.table(table), run.lengths / "predictions.parquet")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forebay.doctor, "preflight", lambda config: called.append("preflight"))
    monkeypatch.setattr(forebay.data.prepare, "prepare_data", lambda run: called.append("prepare_data"))
    monkeypatch.setattr(forebay.lengths.stage, "predict_lengths", predict)
    Path("profile.yaml").write_text("name: small\n")
    result = CliRunner().invoke(cli.app, ["schedule", "profile.yaml", "--set", "schedule.policy=asp"])
    assert result.exit_code == 0, result.output
    assert called == ["preflight", "prepare_data", "predict_lengths"]
    words = " ".join(result.output.split())
    assert re.search(r"policy asp prompts 200 minibatches \d+ batch groups \d+ utilisation 0\.9\d\d", words)
    assert re.search(r"load variation 0\.\d+ over batch groups \(random order 0\.\d+, sorted 0\.\d+\)", words)
    path = re.search(r"written to (\S+schedule\.parquet)", words.replace(" ", "").replace("writtento", "written to "))
    assert path
    assert len(list(tmp_path.glob(".forebay/runs/small-*/schedule/schedule.parquet"))) == 1
    called.clear()
    result = CliRunner().invoke(cli.app, ["schedule", "profile.yaml", "--set", "lengths.assumed.prompt_tokens=100"])
    assert result.exit_code == 0, result.output
    assert called == ["predict_lengths"]


def test_the_command_gives_one_line_for_bad_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(run: RunContext) -> None:
        run.lengths.mkdir()
        ids = ["a", *"bcdefghijklmnopqrs"]
        table = {"prompt_id": ids, "predicted": [float("nan")] + [1.0] * (len(ids) - 1)}
        pq.write_table(pa.table(table), run.lengths / "predictions.parquet")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forebay.lengths.stage, "predict_lengths", predict)
    Path("profile.yaml").write_text("lengths: {assumed: {prompt_tokens: 100}}\n")
    result = CliRunner().invoke(cli.app, ["schedule", "profile.yaml"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "prompt a has the predicted length nan" in result.stderr


def test_a_hundred_thousand_rows_take_a_moment(tmp_path: Path) -> None:
    run = make_run(tmp_path, lengths(100_000))
    started = time.process_time()
    make_schedule(run)
    groups = read_schedule(run.schedule / FILE)
    assert time.process_time() - started < 3.0
    assert sum(len(minibatch) for group in groups for minibatch in group) == 100_000
