"""Profile a part of the prompts on the start model through vLLM, fit the predictor, predict every training prompt.

Artifacts in `lengths/`: profile.parquet (what was observed), predictions.parquet (every training prompt), report.json
and report.png. With `lengths.assumed` the predictions are drawn, and neither data nor an engine is needed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import UserError
from forebay.lengths.assumed import Assumed, draw, prompt_ids
from forebay.lengths.fitting import Fitted, fit, location_name
from forebay.lengths.history import Responses, read_history
from forebay.lengths.lognormal import capped_quantile
from forebay.lengths.predictor import Predictions
from forebay.lengths.profile import Profile, measure, profile_size
from forebay.lengths.prompts import Observed, Vector, read_prompts
from forebay.lengths.report import LEVELS, Judgement, LengthsResult, judge, result_of, write_report
from forebay.run import RunContext

__all__ = ["LengthsResult", "predict_lengths"]

JUDGED = 20_000
"""Assumed prompts that the report is made from, at most."""


def predict_lengths(run: RunContext) -> LengthsResult:
    """Profile, fit, predict, write the artifacts. Raises `UserError` and `RunError`, one line each."""
    if run.config.lengths.assumed is not None:
        return _assume(run)
    prompts = read_prompts(run.data / "train.parquet")
    if not len(prompts):
        raise UserError(f"{run.data / 'train.parquet'}: the training split is empty")
    history = _history(run)
    profile = measure(run, prompts, greedy=run.config.lengths.greedy if location_name(run) == "features" else "never")
    fitted = fit(run, profile, history)
    config = run.config.lengths
    judgement = judge(fitted.judged, fitted.prompts, fitted.observed, config.quantile)
    result = result_of(
        judgement,
        profile.observed,
        predictor=_describe(run, profile),
        asked=profile.asked,
        upper=config.quantile,
        notes=_notes(run, profile, history),
    )
    _write_predictions(run, prompts.ids, fitted.used.predict(profile.prompts), prompts.sizes.astype(np.int32))
    _write_profile(run, profile, fitted)
    write_report(run, result, judgement)
    return result


def _history(run: RunContext) -> dict[str, Responses]:
    config = run.config.lengths
    if config.predictor != "history":
        return {}
    assert config.history is not None  # RunConfig has checked it
    return read_history(Path(config.history).expanduser(), run.config.generation.max_new_tokens)


def _describe(run: RunContext, profile: Profile) -> str:
    name = location_name(run) + (" with greedy responses" if profile.greedy else "")
    return f"history, else {name}" if run.config.lengths.predictor == "history" else name


def _notes(run: RunContext, profile: Profile, history: dict[str, Responses]) -> list[str]:
    """What was not as the profile of the run asks, or as one would expect."""
    config, count, notes = run.config.lengths, len(profile.prompts), []
    size = profile_size(config, count)
    if config.profile_prompts and size < config.profile_prompts:
        notes.append(f"lengths.profile_prompts {config.profile_prompts:,}: only {size:,} of {count:,} training prompts")
    if config.predictor == "history":
        known = sum(name in history for name in profile.prompts.ids)
        notes.append(f"{known:,} of {count:,} prompts are in {config.history}")
    if profile.refused:
        notes.append(f"{profile.refused:,} prompts were refused by every engine and tell nothing")
    if bad := _quarantined(run.data / "quarantine.parquet"):
        notes.append(f"{bad}; reasons in {run.data / 'quarantine.parquet'}")
    return notes


def _quarantined(path: Path) -> str:
    if not path.exists():
        return ""
    reasons = pq.read_table(path, columns=["reason"])["reason"]
    long = pc.sum(pc.starts_with(reasons, "the prompt has ")).as_py() or 0
    if not len(reasons):
        return ""
    return f"{len(reasons):,} rows are in quarantine, {long:,} of them prompts that leave no room for a response"


def _write_predictions(
    run: RunContext, ids: Sequence[str], predictions: Predictions, prompt_tokens: np.ndarray
) -> None:
    columns = {
        "prompt_id": pa.array(ids, pa.string()),
        "predicted": predictions.mean,
        "median": predictions.median,
        "upper": predictions.upper,
        "prompt_tokens": prompt_tokens,
    }
    run.lengths.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), run.lengths / "predictions.parquet")


def _write_profile(run: RunContext, profile: Profile, fitted: Fitted) -> None:
    """One row a profiled prompt; predictions are the judged predictor's, so that those of held-out ones are honest."""
    prompts = profile.prompts.take(profile.index)
    predicted, lists = fitted.judged.predict(prompts), profile.observed.lists()
    held_out = len(fitted.prompts)
    columns = {
        "prompt_id": prompts.ids,
        "lengths": pa.array([np.asarray(lengths, dtype=np.int32) for lengths, _ in lists], pa.list_(pa.int32())),
        "truncated": pa.array([flags for _, flags in lists], pa.list_(pa.bool_())),
        "mean": profile.observed.means(),
        "predicted": predicted.mean,
        "upper": predicted.upper,
        "held_out": np.arange(len(prompts)) < held_out,
    }
    pq.write_table(pa.table(columns), run.lengths / "profile.parquet")


def _assume(run: RunContext) -> LengthsResult:
    """Draw what would be predicted; report on the first `JUDGED` prompts, with `lengths.samples` responses each."""
    config = run.config
    assumed = config.lengths.assumed
    assert assumed is not None
    budget, upper = config.generation.max_new_tokens, config.lengths.quantile
    drawn = draw(config.data.train_prompts, config.lengths.samples, assumed, budget, config.seed)
    median, high = (np.maximum(capped_quantile(drawn.location, drawn.spread, s, budget), 1.0) for s in (0.5, upper))
    predictions = Predictions(drawn.predicted, median, high)
    _write_predictions(run, prompt_ids(config.data.train_prompts), predictions, drawn.prompt_tokens)
    judgement = _judge_assumed(drawn, budget, upper)
    result = result_of(
        judgement,
        judgement.observed,
        predictor=f"assumed, Spearman {assumed.rank_correlation:g} with the expected length",
        asked=0,
        upper=upper,
        notes=["assumed lengths (lengths.assumed): no model was asked"],
    )
    write_report(run, result, judgement)
    return result


def _judge_assumed(drawn: Assumed, budget: int, upper: float) -> Judgement:
    lengths = drawn.lengths[:JUDGED].astype(np.float64)
    count, each = lengths.shape
    cut = lengths >= budget
    observed = Observed(count, np.repeat(np.arange(count), each), lengths.ravel(), cut.ravel())
    location = drawn.location[:JUDGED]

    def below(share: float) -> float:
        limit = capped_quantile(location, drawn.spread, share, budget)
        return float(np.mean(lengths <= np.rint(limit)[:, None]))

    curve: Vector = np.array([below(level) for level in LEVELS])
    return Judgement(drawn.predicted[:JUDGED], observed, curve, below(upper), below(0.5))
