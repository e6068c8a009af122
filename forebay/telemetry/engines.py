"""What each engine did while training went on, from the records of `metrics.jsonl`.

Invariant: an engine is idle at an observation without any response in flight there, whatever the reason: nothing to
do, being restarted, or halted by a refresh.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from forebay.telemetry.metrics import Metrics, Record


def engine_accounts(metrics: Metrics) -> list[dict[str, Any]]:
    """One for each engine, by its number: `idle_ratio` (share of the observations from the first step's end to the last
    one's; null if there is none), `responses` (mean number in flight in them), `tokens` (of responses, generated while
    observed), `refreshes`, `pause_mean_s`, `pause_max_s` (null without a refresh), `tokens_recomputed`,
    `tokens_discarded`."""
    count = max([len(record.get("active", ())) for record in metrics.queue], default=0)
    count = max([count, *(record["engine"] + 1 for record in metrics.refreshes)])
    return [_account(metrics, engine) for engine in range(count)]


def idle_ratio(accounts: Sequence[dict[str, Any]]) -> float | None:
    """Mean over the engines; None if none was observed."""
    known = [account["idle_ratio"] for account in accounts if account["idle_ratio"] is not None]
    return statistics.fmean(known) if known else None


def _account(metrics: Metrics, engine: int) -> dict[str, Any]:
    seen = [record for record in metrics.queue if len(record.get("active", ())) > engine]
    active = [record["active"][engine] for record in _while_training(metrics, seen)]
    tokens = [0, *(record["tokens"][engine] for record in seen)]
    refreshes = [record for record in metrics.refreshes if record["engine"] == engine]
    pauses = [record["pause_s"] for record in refreshes]
    return {
        "engine": engine,
        "idle_ratio": sum(responses == 0 for responses in active) / len(active) if active else None,
        "responses": statistics.fmean(active) if active else None,
        # An engine that was started anew counts from nothing again.
        "tokens": sum(after - before if after >= before else after for before, after in pairwise(tokens)),
        "refreshes": len(refreshes),
        "pause_mean_s": statistics.fmean(pauses) if pauses else None,
        "pause_max_s": max(pauses, default=None),
        "tokens_recomputed": sum(record["tokens_recomputed"] for record in refreshes),
        "tokens_discarded": sum(record["tokens_discarded"] for record in refreshes),
    }


def _while_training(metrics: Metrics, seen: Sequence[Record]) -> list[Record]:
    """Without the cold start and what comes after the last step."""
    if not metrics.steps:
        return []
    first, last = metrics.steps[0]["t"], metrics.steps[-1]["t"]
    return [record for record in seen if first <= record["t"] <= last]
