"""The flow's own logic, with stub stages and without a server."""

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import tasks.artifacts as artifacts
import tasks.publish
from flows.local import run_pipeline
from flows.pipeline import pipeline
from flows.signals import orderly_termination
from forebay.config import RunConfig, StorageConfig, TrainingConfig
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.telemetry.summary import KEYS, STAGES, add_publish_time, build_summary, failure_summary
from tests.stub_stages import stub_stages


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    storage = StorageConfig(uri=f"file://{tmp_path}/store", scratch=str(tmp_path / "scratch"))
    return RunConfig(name="unit", training=TrainingConfig(steps=3), storage=storage)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Stub stages, tasks without their Prefect engine; returns the artifacts as they are saved: (key, content)."""
    import tasks.evaluate
    import tasks.predict_lengths
    import tasks.prepare_data
    import tasks.train

    monkeypatch.setattr(tasks.prepare_data.stage, "prepare_data", stub_stages.prepare_data)
    monkeypatch.setattr(tasks.predict_lengths.lengths_stage, "predict_lengths", stub_stages.predict_lengths)
    monkeypatch.setattr(tasks.predict_lengths.schedule_stage, "make_schedule", stub_stages.make_schedule)
    monkeypatch.setattr(tasks.train.stage, "train", stub_stages.train)
    monkeypatch.setattr(tasks.evaluate.stage, "evaluate", stub_stages.evaluate)
    monkeypatch.setattr(tasks.publish.report, "write_report", stub_stages.write_report)
    monkeypatch.setattr(tasks.publish.report, "report_markdown", stub_stages.report_markdown)
    monkeypatch.setattr(tasks.publish.storage, "publish", stub_stages.publish)

    import flows.pipeline as module

    for name in STAGES:
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(artifacts, "create_table_artifact", lambda table, key, **_: calls.append((key, table)))
    monkeypatch.setattr(artifacts, "create_markdown_artifact", lambda text, key, **_: calls.append((key, text)))
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda percent, key, **_: calls.append((key, percent)))
    return calls


def published(config: RunConfig) -> dict[str, object]:
    (path,) = Path(config.storage.uri.removeprefix("file://")).glob("*/summary.json")
    return json.loads(path.read_text())


def test_a_complete_run_publishes_its_summary(config: RunConfig, saved: list[tuple[str, object]]) -> None:
    summary = pipeline.fn(config=config)
    assert summary == published(config)
    assert set(KEYS) == set(summary)
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert list(summary["stages"]) == list(STAGES)
    assert sum(summary["stages"].values()) <= summary["wall_s"] + 0.001 * len(STAGES)
    assert summary["step_time_s"] == 2.0
    assert summary["train_wait_ratio"] == pytest.approx(1.5 / 6.0)
    assert summary["staleness"] == {
        "bound": 4,
        "mean": 1.5,
        "max": 3,
        "p95": 3,
        "histogram": {"0": 4, "2": 2, "3": 1},
        "samples": {"mean": 1.4, "p95": 3, "max": 3, "histogram": {"0": 40, "3": 10}},
        "tokens": {"mean": 1.25, "p95": 2, "max": 3, "histogram": {"0": 400, "3": 100}},
    }
    assert summary["refresh"] == {
        "mode": config.control.refresh,
        "count": 2,
        "pause_mean_s": 0.02,
        "pause_max_s": 0.03,
        "pause_share_of_step": pytest.approx(0.01),
        "tokens_recomputed": 640,
        "tokens_discarded": 12,
    }
    assert summary["engines"] == {"restarts": 1, "idle_ratio": None, "each": []}
    assert summary["trainer"] == {"restarts": 0}
    assert summary["learning"] == {"correction": "behaviour"}
    assert summary["rewards"]["verdicts"]["timed_out"] == 1
    assert summary["rewards"]["warnings"] == {"AllScoresEqual": 2}
    fates = summary["fates"]
    assert fates["admitted"] == sum(fates[fate] for fate in ("trained", "filtered", "stale", "failed"))
    told = {"n": 64, "before": 0.25, "after": 0.5, "p_value": 0.001, "interval": [0.1, 0.4], "test_sha256": "0" * 64}
    assert summary["evaluation"] == {**told, "during": []}


def test_a_complete_run_saves_its_artifacts(config: RunConfig, saved: list[tuple[str, object]]) -> None:
    pipeline.fn(config=config)
    contents = dict(saved)
    assert list(contents) == ["response-lengths", "training", "evaluation", "report"]
    assert {"quantity": "minibatches", "value": 3} in contents["response-lengths"]
    assert contents["training"] == 100.0
    assert [row["score"] for row in contents["evaluation"]] == [0.25, 0.5]
    assert "file://" in contents["report"]


def test_a_failed_run_is_published_and_raises_its_own_error(
    config: RunConfig, saved: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_TRAIN", "fail")
    with pytest.raises(RunError, match="engine 0 died"):
        pipeline.fn(config=config)
    summary = published(config)
    assert summary["status"] == "failed"
    assert summary["error"] == "engine 0 died with token ***"
    assert list(summary["stages"]) == ["prepare_data", "predict_lengths", "train"]
    assert summary["evaluation"] is None


def test_a_cancelled_run_is_published_as_cancelled(
    config: RunConfig, saved: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: RunContext, on_progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks.train.stage, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.fn(config=config)
    assert published(config)["status"] == "cancelled"


def test_trouble_while_publishing_a_failure_does_not_hide_the_failure(
    config: RunConfig,
    saved: list[tuple[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_store(run: RunContext, summary: dict[str, object]) -> str:
        raise RunError("the store is away")

    monkeypatch.setenv("STUB_TRAIN", "fail")
    monkeypatch.setattr(tasks.publish.storage, "publish", no_store)
    with pytest.raises(RunError, match="engine 0 died"):
        pipeline.fn(config=config)
    assert "the store is away" in caplog.text


def test_a_profile_that_is_wrong_starts_no_run(config: RunConfig, saved: list[tuple[str, object]]) -> None:
    with pytest.raises(UserError, match="no such profile"):
        pipeline.fn(profile="nowhere.yaml")
    with pytest.raises(UserError, match="overrides change a profile"):
        pipeline.fn(config=config, overrides=("seed=1",))
    assert not Path(config.storage.scratch).exists()


def test_a_profile_is_read_with_its_overrides(
    config: RunConfig, saved: list[tuple[str, object]], tmp_path: Path
) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(f"name: from_profile\nstorage: {{scratch: {tmp_path}/s, uri: 'file://{tmp_path}/u'}}\n")
    summary = pipeline.fn(profile=str(profile), overrides=("mode=sync", "training.steps=2"))
    assert summary["mode"] == "sync"
    assert summary["steps"] == 2
    assert summary["run_id"].startswith("from_profile-")


def test_a_server_that_is_away_costs_a_warning(
    config: RunConfig,
    saved: list[tuple[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: object, **__: object) -> None:
        raise httpx.ConnectError("refused")

    for name in ("create_table_artifact", "create_markdown_artifact", "create_progress_artifact"):
        monkeypatch.setattr(artifacts, name, away)
    assert pipeline.fn(config=config)["status"] == "completed"
    assert caplog.text.count("not saved: ConnectError") == 4


def test_progress_is_sent_by_another_thread_and_not_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda percent, **_: sent.append(percent) or "id")
    monkeypatch.setattr(artifacts, "update_progress_artifact", lambda _, percent, **__: sent.append(percent))
    with artifacts.TrainingProgress(steps=100, interval_s=30.0) as progress:
        for step in range(1, 101):
            progress.report({"step": step})
    assert sent == [100.0]


def test_numbers_that_json_cannot_hold_become_null(config: RunConfig) -> None:
    run = RunContext.create(config)
    summary = build_summary(
        run,
        stages={"train": 1.0},
        wall_s=2.0,
        lengths=replace(stub_stages.Lengths(), spearman=math.nan),
        schedule=stub_stages.Schedule(),
        trained=stub_stages.Trained(0, [], []),
        evaluation=replace(stub_stages.Evaluated(), p_value=math.inf),
    )
    assert summary["lengths"]["spearman"] is None
    assert summary["evaluation"]["p_value"] is None
    assert summary["step_time_s"] is None
    assert summary["train_wait_ratio"] is None
    assert summary["refresh"]["pause_share_of_step"] is None
    json.dumps(summary, allow_nan=False)


def test_publish_time_counts_in_stage_and_wall(config: RunConfig) -> None:
    run = RunContext.create(config)
    summary = failure_summary(run, status="failed", error=ValueError("bad"), stages={"train": 1.0}, wall_s=2.0)
    assert summary["error"] == "ValueError: bad"
    add_publish_time(summary, 0.5)
    add_publish_time(summary, 0.25)
    assert summary["stages"] == {"train": 1.0, "publish": 0.75}
    assert summary["wall_s"] == 2.75


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """Handles SIGTERM as Prefect does, by raising; returns the signals."""
    signals: list[int] = []

    def handler(number: int, frame: object) -> None:
        signals.append(number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    yield signals
    signal.signal(signal.SIGTERM, before)


class Terminated(BaseException):
    pass


def test_sigterm_in_an_event_loop_is_not_swallowed(terminated: list[int]) -> None:
    ended_in_order = False

    async def handler_that_catches_everything() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)

    async def stage() -> None:
        nonlocal ended_in_order
        task = asyncio.create_task(handler_that_catches_everything())
        try:
            await asyncio.sleep(60)
        finally:
            ended_in_order = task.done()

    with pytest.raises(Terminated), orderly_termination():
        asyncio.run(stage())
    assert ended_in_order
    assert terminated == [signal.SIGTERM]


def terminate_and_go_on() -> None:
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("went on after SIGTERM")


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_in_plain_code_ends_it(terminated: list[int], ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with pytest.raises(Terminated), orderly_termination():
            terminate_and_go_on()
        assert signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if ignored else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)
    assert terminated == [signal.SIGTERM]


def test_a_scratch_that_cannot_be_made_is_the_users_mistake(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    Path(config.storage.scratch).write_text("a file in the way")
    with pytest.raises(UserError, match=r"choose another storage\.scratch"):
        run_pipeline(config)
