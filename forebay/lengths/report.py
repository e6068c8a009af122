"""How well lengths can be told before the run: the numbers, a table and `report.json`, `report.png`.

Everything is measured on held-out prompts, which the judged predictor did not see. Quantiles are calibrated on a part
of these and counted on the rest, in turn, so that no response counts for the quantile that it helped to set.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from forebay.lengths.ceiling import ceiling, kendall, spearman
from forebay.lengths.censored import estimate
from forebay.lengths.predictor import Calibrated, quantile, scores
from forebay.lengths.prompts import Observed, Prompts, Vector
from forebay.run import RunContext

LEVELS = tuple(float(level) for level in np.round(np.arange(0.05, 1.0, 0.05), 2))
"""Quantiles of the calibration curve."""
FOLDS = 10
"""Parts of the held-out prompts, each judged by the others."""
SHOWN = 4000
"""Points drawn at most."""
_INK, _MUTED, _GRID, _BLUE, _ORANGE, _GREY = "#1f2933", "#7b8794", "#e4e7eb", "#1f6fb2", "#e08a1e", "#b8c0c8"


@dataclass(frozen=True)
class LengthsResult:
    """How well lengths can be told before the run. None: it cannot be measured (nothing differs, or too few)."""

    predictor: str
    profiled: int
    """Prompts that were answered."""
    asked: int
    """Responses that were generated now; 0: all came from the cache."""
    held_out: int
    """Prompts that the numbers below are measured on."""
    spearman: float | None
    """Rank correlation of predicted and observed mean lengths."""
    kendall: float | None
    """Another one: the share of pairs in right order minus that in wrong order."""
    mae: float
    """Mean absolute error of the predicted mean length, in tokens."""
    ceiling: float | None
    """Spearman's correlation of a perfect predictor (see `forebay.lengths.ceiling`)."""
    share: float | None
    """`spearman` over `ceiling`."""
    quantile: float
    """The upper quantile that was asked for."""
    coverage: float | None
    """Share of responses that are no longer than predicted with it."""
    median_coverage: float | None
    """And than the predicted median."""
    mean_length: float
    """Observed, in tokens."""
    truncated: float
    """Share of responses cut at the budget."""
    median: float
    prompt_sd: float
    within_sd: float
    """The log-normal model of the start model's lengths, as `lengths.assumed` takes it to plan without an engine."""
    notes: tuple[str, ...] = ()
    """What a reader should know, a sentence each."""


@dataclass(frozen=True)
class Judgement:
    """Held-out prompts: what was predicted and what was observed."""

    predicted: Vector
    """[P] mean lengths."""
    observed: Observed
    coverage: Vector | None
    """[LEVELS] share of responses below the predicted quantile of each level."""
    upper: float | None
    """Likewise, below the upper quantile that was asked for."""
    median: float | None


def judge(predictor: Calibrated, prompts: Prompts, observed: Observed, upper: float) -> Judgement:
    """Of held-out prompts."""
    values = scores(predictor, prompts, observed)
    curve = coverage(values, observed, (*LEVELS, upper, 0.5))
    predicted = predictor.predict(prompts).mean
    if curve is None:
        return Judgement(predicted, observed, None, None, None)
    return Judgement(predicted, observed, curve[:-2], float(curve[-2]), float(curve[-1]))


def coverage(values: Vector, observed: Observed, levels: Sequence[float]) -> Vector | None:
    """Share of responses below each quantile, each prompt's counted with the quantile that the prompts of the other
    `FOLDS` - 1 random parts give (cross-validation).

    `values`: standardised residuals of the responses. A truncated one is covered if the predicted quantile is the
    budget. None for fewer than two prompts."""
    if observed.prompts < 2:
        return None
    # By chance: the prompts come in an order of which every other one is short (`profile.sample_order`).
    part = np.random.default_rng(0).permutation(observed.prompts) % min(FOLDS, observed.prompts)
    covered = np.zeros(len(levels))
    for number in range(part.max() + 1):
        judged = part[observed.owner] == number
        prompts = len(np.unique(observed.owner[~judged]))
        for i, level in enumerate(levels):
            limit = quantile(values[~judged], observed.truncated[~judged], level, prompts)
            covered[i] += np.count_nonzero(values[judged] <= limit)
    return covered / len(values)


def result_of(
    judgement: Judgement,
    everything: Observed,
    *,
    predictor: str,
    asked: int,
    upper: float,
    notes: Sequence[str] = (),
) -> LengthsResult:
    """`everything`: all profiled prompts; the ceiling is known better from all of them."""
    means = judgement.observed.means()
    rank, top, spread = spearman(judgement.predicted, means), ceiling(everything), estimate(everything)
    notes = list(notes)
    if np.ptp(everything.lengths) == 0:
        notes.append("all lengths are equal: nothing can be ranked, and every order of the prompts is as good")
    elif rank is None:
        notes.append("the held-out prompts or their predictions are all equal: there is no rank correlation")
    return LengthsResult(
        predictor=predictor,
        profiled=everything.prompts,
        asked=asked,
        held_out=judgement.observed.prompts,
        spearman=rank,
        kendall=kendall(judgement.predicted, means),
        mae=float(np.mean(np.abs(judgement.predicted - means))),
        ceiling=top.spearman if top else None,
        share=rank / top.spearman if rank is not None and top and top.spearman > 0 else None,
        quantile=upper,
        coverage=judgement.upper,
        median_coverage=judgement.median,
        mean_length=float(everything.lengths.mean()),
        truncated=float(everything.truncated.mean()),
        median=math.exp(spread.location),
        prompt_sd=spread.between,
        within_sd=spread.within,
        notes=tuple(notes),
    )


def write_report(run: RunContext, result: LengthsResult, judgement: Judgement) -> Path:
    """`report.json` and `report.png` in the run's folder of lengths; the path of the figure."""
    curve = (
        None if judgement.coverage is None else dict(zip(map(str, LEVELS), judgement.coverage.tolist(), strict=True))
    )
    record = {"run_id": run.run_id, **asdict(result), "coverage_by_quantile": curve}
    (run.lengths / "report.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    place = run.lengths / "report.png"
    draw(result, judgement).savefig(place, dpi=100)
    return place


def lines(run: RunContext, result: LengthsResult) -> list[tuple[str, str]]:
    """(name, text) of what `forebay lengths` prints; what could not be measured is a dash."""
    source = f"{result.asked:,} responses generated now" if result.asked else "all from the cache"
    if run.config.lengths.assumed:
        source = f"of {run.config.data.train_prompts:,} that were drawn"
    budget = run.config.generation.max_new_tokens
    share = f", {result.share:.0%} of it reached" if result.share is not None else ""
    quantiles = f"{_percent(result.coverage)} of responses below the {result.quantile:.0%} quantile, "
    return [
        ("predictor", result.predictor),
        ("profile", f"{result.profiled:,} prompts, {source}"),
        ("mean length", f"{result.mean_length:,.1f} tokens, {result.truncated:.1%} cut off at {budget:,}"),
        (
            "spread",
            f"log-normal, median {result.median:,.1f} tokens, standard deviation of the logarithm "
            f"{result.prompt_sd:.2f} between prompts, {result.within_sd:.2f} within one",
        ),
        (
            "rank correlation",
            f"Spearman {_number(result.spearman)}, Kendall {_number(result.kendall)} "
            f"on {result.held_out:,} held-out prompts",
        ),
        ("ceiling", f"Spearman {_number(result.ceiling)} for a perfect predictor{share}"),
        ("error", f"{result.mae:,.1f} tokens (mean absolute, of a prompt's mean length)"),
        ("coverage", f"{quantiles}{_percent(result.median_coverage)} below the median"),
        *(("note", note) for note in result.notes),
        ("predictions", str(run.lengths / "predictions.parquet")),
        ("report", f"{run.lengths / 'report.png'}, report.json"),
    ]


def draw(result: LengthsResult, judgement: Judgement) -> Figure:
    """Predicted against observed mean length, and the calibration curve (1300 x 560 pixels at 100 dpi)."""
    figure = Figure(figsize=(13, 5.6), dpi=100, facecolor="white")
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.18, "width_ratios": (1.25, 1)})
    figure.subplots_adjust(left=0.065, right=0.985, top=0.86, bottom=0.11)
    figure.text(0.065, 0.94, f"Response length told by: {result.predictor}", fontsize=15, color=_INK, weight="bold")
    _draw_prediction(left, result, judgement)
    _draw_calibration(right, result, judgement)
    return figure


def _draw_prediction(ax: Axes, result: LengthsResult, judgement: Judgement) -> None:
    top = f", ceiling {result.ceiling:.2f}" if result.ceiling is not None else ""
    _style(ax, f"Mean length of held-out prompts (rank correlation {_number(result.spearman)}{top})")
    x, y = judgement.predicted[:SHOWN], judgement.observed.means()[:SHOWN]
    low, high = min(x.min(), y.min()) * 0.9, max(x.max(), y.max()) * 1.1
    ax.plot([low, high], [low, high], color=_GREY, linewidth=1.2, linestyle="--", label="exact prediction")
    ax.scatter(x, y, s=20, color=_BLUE, alpha=0.7, edgecolor="white", linewidth=0.4, label="a prompt")
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("predicted tokens")
    ax.set_ylabel("observed tokens")
    ax.legend(loc="upper left", fontsize=9.5, frameon=False, labelcolor=_INK)


def _draw_calibration(ax: Axes, result: LengthsResult, judgement: Judgement) -> None:
    _style(ax, "Responses below their predicted quantile")
    ax.plot([0, 1], [0, 1], color=_GREY, linewidth=1.2, linestyle="--", label="exact calibration")
    if judgement.coverage is None or judgement.upper is None:
        ax.text(0.5, 0.5, "too few held-out prompts", ha="center", va="center", color=_MUTED, fontsize=12)
    else:
        ax.plot(LEVELS, judgement.coverage, color=_BLUE, linewidth=1.8, marker="o", markersize=4, label="held out")
        label = f"the {result.quantile:.0%} quantile: {judgement.upper:.1%}"
        ax.scatter([result.quantile], [judgement.upper], s=60, color=_ORANGE, zorder=3, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    ax.set_xlabel("quantile")
    ax.set_ylabel("share of responses")
    ax.legend(loc="upper left", fontsize=9.5, frameon=False, labelcolor=_INK)


def _style(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=11.5, color=_INK, pad=8)
    ax.grid(True, color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(colors=_INK, labelsize=10, length=3)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
