"""`summary.json`: what a run was and did, in one dictionary.

Invariants:
- The keys of `KEYS` are always there; a stage that did not run leaves null (a run that failed has no evaluation).
- Every number is finite or null, so the file is JSON in every language.
- `wall_s` is at least the sum of `stages`: stages run one after another inside it.
"""

import json
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from forebay.errors import ForebayError
from forebay.run import RunContext
from forebay.scheduling.quality import true_variation
from forebay.telemetry.engines import engine_accounts, idle_ratio
from forebay.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from forebay.control.recorder import Ages
    from forebay.evaluation.stage import EvaluationResult
    from forebay.lengths.stage import LengthsResult
    from forebay.scheduling.schedule import ScheduleResult
    from forebay.train import TrainResult

STAGES = ("prepare_data", "predict_lengths", "train", "evaluate", "publish")

KEYS = (
    "run_id",
    "status",
    "error",
    "wall_s",
    "stages",
    "mode",
    "data",
    "evaluation",
    "step_time_s",
    "train_wait_ratio",
    "staleness",
    "refresh",
    "engines",
    "trainer",
    "learning",
    "fates",
    "rewards",
    "tokens_per_s",
    "lengths",
    "schedule",
    "steps",
    "minibatches",
)

EndStatus = Literal["failed", "cancelled"]


def build_summary(
    run: RunContext,
    *,
    stages: Mapping[str, float],
    wall_s: float,
    lengths: "LengthsResult",
    schedule: "ScheduleResult",
    trained: "TrainResult",
    evaluation: "EvaluationResult",
) -> dict[str, Any]:
    """Summary of a complete run. `stages`: stage -> seconds; `wall_s`: seconds since the run began.

    `step_time_s` is the median step; `train_wait_ratio` the share of all step time that the trainer waited for data.
    """
    step_s, wait_s = sum(trained.step_times), sum(trained.train_waits)
    summary = _base(run, "completed", stages, wall_s) | {
        "evaluation": {
            "n": evaluation.n,
            "before": _finite(evaluation.before),
            "after": _finite(evaluation.after),
            "p_value": _finite(evaluation.p_value),
            "interval": [_finite(end) for end in evaluation.interval],
            "test_sha256": evaluation.test_sha256,
            "during": trained.examinations,
        },
        "step_time_s": _finite(statistics.median(trained.step_times)) if trained.step_times else None,
        "train_wait_ratio": _finite(wait_s / step_s) if step_s > 0 else None,
        "staleness": _staleness(trained),
        "refresh": _refresh(run, trained),
        "engines": _engines(run, trained),
        "trainer": {"restarts": trained.trainer_restarts},
        "learning": trained.learning,
        "fates": {str(fate): count for fate, count in trained.fates.items()},
        "rewards": {"verdicts": trained.verdicts, "warnings": trained.reward_warnings},
        "tokens_per_s": _finite(trained.tokens_per_s),
        "lengths": {
            "predictor": lengths.predictor,
            "spearman": _finite(lengths.spearman),
            "kendall": _finite(lengths.kendall),
            "ceiling": _finite(lengths.ceiling),
            "share": _finite(lengths.share),
            "mae": _finite(lengths.mae),
            "coverage": _finite(lengths.coverage),
        },
        "schedule": _schedule(run, schedule),
        "steps": trained.steps,
        "minibatches": schedule.minibatches,
    }
    return summary


def _staleness(trained: "TrainResult") -> dict[str, Any]:
    """In versions: of the trained groups by their oldest token, of each response (`samples`), of each token."""
    levels = {"samples": trained.sample_staleness, "tokens": trained.token_staleness}
    return {
        "bound": trained.staleness_bound,
        **_ages(trained.staleness),
        **{name: _ages(ages) for name, ages in levels.items()},
    }


def _ages(ages: "Ages") -> dict[str, Any]:
    histogram = {str(age): count for age, count in ages.histogram.items()}
    return {"mean": _finite(ages.mean), "p95": ages.p95, "max": ages.max, "histogram": histogram}


def _refresh(run: RunContext, trained: "TrainResult") -> dict[str, Any]:
    """`pause_share_of_step`: mean pause of one engine for one refresh, over the median step time."""
    step_s = statistics.median(trained.step_times) if trained.step_times else 0.0
    return {
        "mode": run.config.control.refresh,
        "count": trained.refreshes,
        "pause_mean_s": _finite(trained.refresh_pause_s) if trained.refreshes else None,
        "pause_max_s": _finite(trained.refresh_pause_max_s) if trained.refreshes else None,
        "pause_share_of_step": _finite(trained.refresh_pause_s / step_s) if trained.refreshes and step_s else None,
        "tokens_recomputed": trained.tokens_recomputed,
        "tokens_discarded": trained.tokens_discarded,
    }


def _engines(run: RunContext, trained: "TrainResult") -> dict[str, Any]:
    """`idle_ratio`: the mean of the engines', each of which is in `each` with its refreshes."""
    accounts = engine_accounts(read_metrics(run.metrics))
    return {"restarts": trained.engine_restarts, "idle_ratio": _finite(idle_ratio(accounts)), "each": accounts}


def _schedule(run: RunContext, schedule: "ScheduleResult") -> dict[str, Any]:
    """Coefficients of variation of the batch groups' load: as scheduled, in random order, sorted by prediction; by
    predicted and by true lengths. null: too few whole batch groups were answered."""
    true = true_variation(run)
    return {
        "policy": schedule.policy,
        "load_variation": _finite(schedule.load_variation),
        "random": _finite(schedule.random_variation),
        "sorted": _finite(schedule.sorted_variation),
        "true_load_variation": _finite(true.scheduled) if true else None,
        "true_random": _finite(true.random) if true else None,
        "true_sorted": _finite(true.sorted) if true else None,
    }


def failure_summary(
    run: RunContext, *, status: EndStatus, error: BaseException, stages: Mapping[str, float], wall_s: float
) -> dict[str, Any]:
    """Summary of a run that ended early; the last of `stages` is the one that was running."""
    summary = _base(run, status, stages, wall_s)
    summary["error"] = error_line(run, error)
    return summary


def add_publish_time(summary: dict[str, Any], seconds: float) -> None:
    """Count `seconds` of publishing in a summary that is about to be written."""
    summary["stages"]["publish"] = round(summary["stages"].get("publish", 0.0) + seconds, 3)
    summary["wall_s"] = round(summary["wall_s"] + seconds, 3)


def error_line(run: RunContext, error: BaseException) -> str:
    """One line without the run's token; an unexpected error keeps its type's name."""
    text = " ".join(str(error).split()).replace(run.token, "***")
    if isinstance(error, ForebayError):
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _base(run: RunContext, status: str, stages: Mapping[str, float], wall_s: float) -> dict[str, Any]:
    summary: dict[str, Any] = dict.fromkeys(KEYS)
    summary.update(
        run_id=run.run_id,
        status=status,
        wall_s=round(wall_s, 3),
        stages={name: round(seconds, 3) for name, seconds in stages.items()},
        mode=run.config.mode,
        data=_data(run),
    )
    return summary


def _data(run: RunContext) -> dict[str, Any] | None:
    """The account of the rows, their data sets' versions (none of a built-in task), splits with too few prompts."""
    try:
        record = json.loads((run.data / "dataset.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    versions = [version["version"] for version in record["versions"]]
    return {"counts": record["counts"], "versions": versions, "warnings": record.get("warnings", [])}


def _finite(value: float | None) -> float | None:
    """NaN (a correlation of constants, say) and infinity have no JSON: null."""
    return float(value) if value is not None and math.isfinite(value) else None
