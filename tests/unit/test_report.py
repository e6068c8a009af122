"""The report draws what there is, and reads files that were cut off."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from forebay.config import DataConfig, RunConfig, StorageConfig
from forebay.evaluation.stage import EvaluationResult
from forebay.run import RunContext
from forebay.telemetry import report
from forebay.telemetry.metrics import read_metrics, series
from forebay.telemetry.report import TOY_NOTE, report_markdown, smoothed, write_report

SUMMARY: dict[str, Any] = {
    "run_id": "quickstart_cpu-20260101-120000-abcd",
    "status": "completed",
    "error": None,
    "wall_s": 214.3,
    "stages": {"prepare_data": 61.0, "predict_lengths": 24.2, "train": 71.5, "evaluate": 33.1, "publish": 0.4},
    "mode": "fully_async",
    "evaluation": {"n": 512, "before": 0.471, "after": 0.803, "p_value": 2.1e-34},
    "step_time_s": 0.84,
    "train_wait_ratio": 0.21,
    "staleness": {
        "bound": 4.0,
        "mean": 1.42,
        "max": 3.0,
        "p95": 3.0,
        "tokens": {"mean": 1.1},
        "histogram": {"0": 90, "1": 260, "2": 310, "3": 44},
    },
    "refresh": {
        "mode": "retract",
        "count": 60,
        "pause_mean_s": 0.0121,
        "pause_max_s": 0.0304,
        "pause_share_of_step": 0.0144,
        "tokens_recomputed": 81234,
        "tokens_discarded": 0,
    },
    "learning": {
        "advantage": "gae",
        "policy_loss": "ppo",
        "correction": "icepop",
        "clip_fraction": 0.0123,
        "corrected": {"weight_mean": 0.98, "clipped": 0.0, "masked": 0.021, "rejected": 0.0},
        "mismatch": {
            "mean_abs": 0.0031,
            "max_abs": 0.41,
            "kl_k1": 0.0002,
            "kl_k3": 0.00018,
            "perplexity_ratio": 1.0002,
            "effective_sample_size": 0.987,
            "alarms": 2.0,
        },
        "off_policy": {"mean_abs": 0.02, "max_abs": 3.5, "effective_sample_size": 0.9},
        "critic": {"value_loss": 0.08, "explained_variance": 0.2, "explained_variance_last": 0.54},
    },
    "engines": {"restarts": 1},
    "trainer": {"restarts": 0},
    "fates": {"admitted": 982, "trained": 704, "filtered": 256, "stale": 21, "failed": 1},
    "tokens_per_s": 3120.0,
    "lengths": {"spearman": 0.62},
    "steps": 60,
    "minibatches": 256,
}

EVALUATION = EvaluationResult(
    n=512,
    before=0.471,
    after=0.803,
    gained=191,
    lost=21,
    p_value=2.1e-34,
    mean_length_before=17.8,
    mean_length_after=23.2,
    truncated_before=9,
    truncated_after=30,
    left_out=0,
    by_size={"3": (150, 0.58, 0.98), "4": (362, 0.42, 0.73)},
    by_tag={},
    examples=[
        {"prompt": "a1>a1vb1vSa2Gb2", "before": "a2b2", "after": "a2a1b1b2", "before_reward": 0.0, "after_reward": 1.0}
    ],
    interval=(0.28, 0.38),
    samples=1,
    temperature=0.0,
    sampled_before=None,
    sampled_after=None,
    rules_before={"none": 512},
    rules_after={"none": 512},
    test_sha256="ab" * 32,
)


def _run(tmp_path: Path, source: str = "builtin:maze") -> RunContext:
    config = RunConfig(
        name="quickstart_cpu", storage=StorageConfig(scratch=str(tmp_path)), data=DataConfig(source=source)
    )
    return RunContext.create(config)


def _fill(run: RunContext) -> None:
    """Files such as a training writes, with made-up numbers."""
    rng = random.Random(0)
    records: list[dict[str, Any]] = []
    t = 0.0
    for step in range(1, 61):
        wait, train = (9.5 if step == 1 else rng.expovariate(6)), rng.gauss(0.55, 0.05)
        t += wait + train + 0.06
        reward = 0.42 + 0.36 * (1 - np.exp(-step / 18)) + rng.gauss(0, 0.05)
        records.append(
            {"kind": "step", "t": t, "step": step, "train_wait_s": wait, "train_s": train, "publish_s": 0.06}
        )
        records[-1] |= {"reward_mean": reward, "staleness_mean": 1.4, "step_time_s": wait + train + 0.06}
        records.append({"kind": "refresh", "t": t, "engine": 0, "version": step, "pause_s": 0.1})
        for tick in range(4):
            queued = max(0, int(rng.gauss(9, 4)))
            records.append(
                {"kind": "queue", "t": t + tick / 5, "queued": queued, "in_flight": 32 - queued, "version": step}
            )
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    groups = [
        {
            "group_id": i,
            "fate": rng.choices(["trained", "filtered", "stale"], [70, 28, 2])[0],
            "predicted_length": (predicted := rng.uniform(8, 40)),
            "lengths": [max(1, int(predicted * rng.lognormvariate(0.1, 0.4))) for _ in range(8)],
            "staleness": rng.choices([0, 1, 2, 3], [12, 50, 30, 8])[0],
        }
        for i in range(900)
    ]
    pq.write_table(pa.Table.from_pylist(groups), run.root / "ledger.parquet")
    profile = [
        {"predicted": (p := rng.uniform(8, 40)), "mean": p * rng.lognormvariate(0, 0.3), "held_out": i < 32}
        for i in range(128)
    ]
    run.lengths.mkdir()
    pq.write_table(pa.Table.from_pylist(profile), run.lengths / "profile.parquet")


def _texts(run: RunContext, summary: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """All the words in the figure."""
    figures = []
    monkeypatch.setattr(
        report, "Figure", lambda *a, _real=report.Figure, **k: figures.append(_real(*a, **k)) or figures[0]
    )
    write_report(run, summary)
    texts = figures[0].findobj(lambda artist: hasattr(artist, "get_text"))
    return " ".join(" ".join(text.get_text() for text in texts).split())


def test_the_report_of_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path)
    _fill(run)
    words = _texts(run, SUMMARY, monkeypatch)
    assert imread(run.root / "report.png").shape[:2] == (1000, 1400)
    for word in (run.run_id, "fully_async", "47.1%", "80.3%", "p = 2.1e-34", "bound: 4", "0.84 s a step", TOY_NOTE):
        assert word in words, word
    assert "21% of it waiting" in words
    assert "no data" not in words


def test_the_report_of_a_run_that_failed_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, source="mine.jsonl")
    summary = dict.fromkeys(SUMMARY) | {"status": "failed", "error": "engine 0 died:\nout of memory", "stages": {}}
    words = _texts(run, summary, monkeypatch)
    assert words.count("no data") == 6
    assert "engine 0 died: out of memory" in words
    assert "failed" in words
    assert TOY_NOTE not in words


def test_the_report_of_a_run_killed_while_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path)
    _fill(run)
    text = run.metrics.read_text()
    run.metrics.write_text(text[: text.index('"step": 2,') + 4])
    (run.root / "ledger.parquet").write_bytes((run.root / "ledger.parquet").read_bytes()[:500])
    words = _texts(run, {"status": "failed", "error": "killed"}, monkeypatch)
    assert words.count("no data") == 2, "staleness and evaluation"


def test_rewards_that_are_no_percentages_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path)
    summary = SUMMARY | {"evaluation": {"n": 9, "before": -1.5, "after": 2.25, "p_value": 0.5}}
    words = _texts(run, summary, monkeypatch)
    assert "-1.500" in words
    assert "2.250" in words


def test_cut_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"kind": "step", "step": 1}\n{"kind": "other"}\n[1]\n\xff\n\n{"kind": "queue", "t": 2}\n{"kind": "st'
    )
    metrics = read_metrics(path)
    assert metrics.steps == [{"kind": "step", "step": 1}]
    assert metrics.queue == [{"kind": "queue", "t": 2}]
    assert metrics.refreshes == []
    assert read_metrics(tmp_path / "none").steps == []


def test_series_takes_only_points_with_both_numbers() -> None:
    records = [{"x": 1, "y": 2.0}, {"x": 2}, {"x": 3, "y": None}, {"x": 4, "y": float("nan")}, {"x": 5, "y": 6}]
    assert series(records, "x", "y") == ([1, 5], [2.0, 6])


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_smoothing_matches_an_independent_mean(window: int) -> None:
    values = np.random.default_rng(0).normal(size=20)
    kernel = np.ones(window)
    # numpy's "full" convolution, cut so that each mean is centred (one more to the right for even windows).
    sums = np.convolve(values, kernel)[window // 2 :][:20]
    counts = np.convolve(np.ones(20), kernel)[window // 2 :][:20]
    assert smoothed(list(values), window) == pytest.approx(list(sums / counts))


def test_the_markdown_says_what_matters() -> None:
    text = report_markdown(SUMMARY, EVALUATION)
    for part in (
        "47.1% -> **80.3%**, better after training (512 prompts, p = 2.1e-34)",
        TOY_NOTE,
        "| staleness, mean / 95% / largest / bound | 1.42 / 3 / 3 / 4 |",
        "| staleness of a token, mean | 1.10 |",
        "| weight refresh | 60 x retract, pause 12 ms (largest 30 ms), 1.4% of a step, 81,234 tokens recomputed, "
        "0 discarded |",
        "| restarts, engines / trainer | 1 / 0 |",
        "| groups | 982 admitted, 704 trained, 256 filtered, 21 stale, 1 failed |",
        "| train | 71.5 |",
        "191 prompts gained, 21 lost",
        "before: a2 # b2",
        " after: a2 a1 b1 b2",
    ):
        assert part in text, part
    assert TOY_NOTE not in report_markdown(SUMMARY, replace(EVALUATION, by_size={}))


def test_the_markdown_of_a_failed_run() -> None:
    text = report_markdown(dict.fromkeys(SUMMARY) | {"status": "failed", "run_id": "r", "error": "a\nb"}, None)
    assert text.startswith("# r: failed\n\n> a b\n")
    assert "None" not in text


def test_the_text_says_what_was_learnt_by_and_how_far_engine_and_trainer_agreed() -> None:
    text = report_markdown(SUMMARY, None)
    for row in (
        "| advantage, policy loss, correction | gae, ppo, icepop |",
        "| tokens at the clip | 1.23% |",
        "| correction: tokens clipped / masked / rejected | 0 / 0.021 / 0 |",
        "| log-probs of engine and trainer under the same weights: apart, mean / largest | 0.0031 / 0.41 |",
        "same weights: KL by k1 / by k3 / perplexity ratio | 0.0002 / 0.00018 / 1 |",
        "same weights: effective sample size | 98.7% |",
        "same weights: steps with an alarm | 2 |",
        "| log-probs of engine and trainer, all tokens: apart, mean / largest | 0.02 / 3.5 |",
        "| log-probs of engine and trainer, all tokens: effective sample size | 90.0% |",
        "| critic: value loss, explained variance / at the end | 0.08 / 0.2 / 0.54 |",
    ):
        assert row in text
    bare = report_markdown(SUMMARY | {"learning": None}, None)
    assert "correction" not in bare
    assert "critic" not in bare
