import json
from pathlib import Path

import pytest

from forebay.telemetry.engines import engine_accounts, idle_ratio
from forebay.telemetry.metrics import Metrics, read_metrics


def queue(t: float, active: list[int], tokens: list[int]) -> dict:
    return {"kind": "queue", "t": t, "active": active, "tokens": tokens}


def refresh(engine: int, pause_s: float, recomputed: int, discarded: int) -> dict:
    counts = {"tokens_recomputed": recomputed, "tokens_discarded": discarded}
    return {"kind": "refresh", "t": 2.0, "engine": engine, "pause_s": pause_s, **counts}


def test_each_engine_s_idle_share_tokens_and_refreshes(tmp_path: Path) -> None:
    records = [
        queue(0.5, [0, 0], [0, 0]),  # the cold start
        {"kind": "step", "t": 1.0},
        queue(1.5, [8, 0], [100, 40]),
        refresh(0, 0.001, 30, 0),
        queue(2.5, [4, 2], [250, 90]),
        refresh(0, 0.003, 50, 7),
        queue(3.5, [2, 0], [60, 120]),  # the first was started anew
        queue(4.0, [2, 2], [80, 130]),
        {"kind": "step", "t": 4.0},
        queue(4.5, [0, 0], [90, 130]),  # after the last step
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = engine_accounts(read_metrics(path))
    assert first == {
        "engine": 0,
        "idle_ratio": 0.0,
        "responses": 4.0,
        "tokens": 250 + 90,
        "refreshes": 2,
        "pause_mean_s": pytest.approx(0.002),
        "pause_max_s": 0.003,
        "tokens_recomputed": 80,
        "tokens_discarded": 7,
    }
    assert (second["idle_ratio"], second["responses"], second["tokens"]) == (0.5, 1.0, 130)
    assert (second["refreshes"], second["pause_mean_s"], second["pause_max_s"]) == (0, None, None)
    assert idle_ratio([first, second]) == 0.25


def test_a_run_that_was_never_observed_has_no_shares() -> None:
    assert engine_accounts(Metrics()) == []
    assert idle_ratio([]) is None
    (account,) = engine_accounts(Metrics(queue=[queue(0.5, [1], [3])]))
    assert (account["idle_ratio"], account["responses"], account["tokens"]) == (None, None, 3)
    assert idle_ratio([account]) is None
