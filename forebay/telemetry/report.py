"""The report of one run: `report.png` for eyes, Markdown for the Prefect artifact.

Invariants:
- Draws what there is: a run that failed early has a report too, with empty panels that say so.
- Numbers come from the run's files and its summary; nothing is computed anew that the summary holds.
- A run on the built-in toy task says so, in the figure and in the text.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forebay.evaluation.compare import verdict
from forebay.evaluation.table import evaluation_markdown, p_text, score_text
from forebay.run import RunContext
from forebay.telemetry.metrics import Metrics, read_metrics, series

if TYPE_CHECKING:
    from forebay.evaluation.stage import EvaluationResult

TOY_NOTE = (
    "A toy: the start model was taught a bad habit on purpose (walking through walls at dead ends), and training "
    "removes it. This shows that the machinery works, and nothing about other tasks or models."
)

_CRITIC = ("value_loss", "explained_variance", "explained_variance_last")
_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _LIGHT_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#1f6fb2", "#a9cbe8", "#e08a1e", "#2f9e6e", "#b8c0c8", "#b3261e"


def write_report(run: RunContext, summary: Mapping[str, Any]) -> Path:
    """Draw `report.png` (1400 x 1000 pixels) in the run's folder from whatever the run has left there."""
    metrics = read_metrics(run.metrics)
    groups = _read_table(run.root / "ledger.parquet")
    profile = _read_table(run.lengths / "profile.parquet")
    figure = Figure(figsize=(14, 10), dpi=100, facecolor="white")
    axes = figure.subplots(2, 3, gridspec_kw={"wspace": 0.24, "hspace": 0.34}).flat
    figure.subplots_adjust(left=0.055, right=0.98, top=0.835, bottom=0.122)
    panels: list[tuple[str, Callable[[Axes], bool]]] = [
        ("Reward of the sampled groups", lambda ax: _draw_reward(ax, metrics)),
        ("Step time", lambda ax: _draw_step_time(ax, metrics)),
        ("Held-out test prompts", lambda ax: _draw_evaluation(ax, summary)),
        ("Groups in the pipeline", lambda ax: _draw_queue(ax, metrics)),
        ("Staleness of trained groups", lambda ax: _draw_staleness(ax, groups, summary)),
        ("Response length: predicted, actual", lambda ax: _draw_lengths(ax, profile, groups, summary)),
    ]
    for ax, (title, draw) in zip(axes, panels, strict=True):
        _style(ax, title)
        if not draw(ax):
            ax.set_xticks([])
            ax.set_yticks([])
            ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color=_MUTED, fontsize=12)
    _write_header(figure, run, summary)
    if run.config.data.source == "builtin:maze":
        figure.text(0.055, 0.034, textwrap.fill(TOY_NOTE, 150), fontsize=11, color=_INK, style="italic", va="center")
    path = run.root / "report.png"
    figure.savefig(path, dpi=100)
    return path


def report_markdown(summary: Mapping[str, Any], evaluation: "EvaluationResult | None") -> str:
    """The run in Markdown: key numbers, stages, comparison with examples."""
    lines = [f"# {summary.get('run_id') or 'Run'}: {summary.get('status', 'unknown')}", ""]
    if summary.get("error"):
        lines += [f"> {_one_line(str(summary['error']))}", ""]
    if evaluation is not None:
        change = f"{score_text(evaluation.before)} -> **{score_text(evaluation.after)}**"
        said = verdict(evaluation.p_value, evaluation.before, evaluation.after)
        lines += [f"Held-out prompts: {change}, {said} ({evaluation.n} prompts, {p_text(evaluation.p_value)})", ""]
        if evaluation.by_size:
            lines += [f"*{TOY_NOTE}*", ""]
    numbers = _key_numbers(summary)
    if numbers:
        lines += ["| | |", "| --- | ---: |", *(f"| {name} | {text} |" for name, text in numbers), ""]
    stages = _part(summary, "stages")
    if stages:
        lines += ["| stage | seconds |", "| --- | ---: |"]
        lines += [f"| {name} | {_number(seconds, 1)} |" for name, seconds in stages.items()]
        lines += [""]
    if evaluation is not None:
        lines += ["## Start model and trained model", "", evaluation_markdown(evaluation)]
    during = _part(summary, "evaluation").get("during") or []
    if during:
        lines += ["## Held-out prompts during training", "", *_examinations(during), ""]
    return "\n".join(lines).rstrip() + "\n"


def _examinations(during: Sequence[Mapping[str, Any]]) -> list[str]:
    """What it gave and what it cost: seconds in which the engine took no newer weights, and its tokens."""
    lines = ["| version | mean reward | prompts | seconds | tokens |", "| ---: | ---: | ---: | ---: | ---: |"]
    for one in during:
        gave = one.get("given_up") or _number(one.get("reward_mean"), 3) or "-"
        cells = one["version"], gave, one.get("prompts", 0), _number(one["seconds"], 1), one.get("tokens", 0)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _key_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what one wants to know of any run, as far as it is known."""
    staleness, fates = _part(summary, "staleness"), _part(summary, "fates")
    numbers = [
        ("mode", str(summary["mode"]) if summary.get("mode") else None),
        ("wall time", _number(summary.get("wall_s"), 0, " s")),
        ("median step time", _number(summary.get("step_time_s"), 2, " s")),
        ("share of step time waiting for data", _percent(summary.get("train_wait_ratio"))),
        ("share of time that engines were idle", _percent(_part(summary, "engines").get("idle_ratio"))),
        ("response tokens per second", _number(summary.get("tokens_per_s"), 0)),
        ("staleness, mean / 95% / largest / bound", _joined(staleness, ("mean", "p95", "max", "bound"))),
        ("staleness of a token, mean", _number(_part(staleness, "tokens").get("mean"), 2)),
        ("weight refresh", _refresh_text(_part(summary, "refresh"))),
        ("restarts, engines / trainer", _restarts_text(summary)),
        *_learning_numbers(_part(summary, "learning")),
        ("groups", ", ".join(f"{count} {fate}" for fate, count in fates.items()) or None),
        ("rank correlation of predicted lengths", _number(_part(summary, "lengths").get("spearman"), 2)),
    ]
    return [(name, text) for name, text in numbers if text is not None]


def _learning_numbers(learning: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    corrected, critic = _part(learning, "corrected"), _part(learning, "critic")
    names = [learning.get(name) for name in ("advantage", "policy_loss", "correction")]
    return [
        ("advantage, policy loss, correction", ", ".join(map(str, names)) if learning else None),
        ("tokens at the clip", _percent(learning.get("clip_fraction"), 2)),
        ("correction: tokens clipped / masked / rejected", _joined(corrected, ("clipped", "masked", "rejected"))),
        *_difference(_part(learning, "mismatch"), "log-probs of engine and trainer under the same weights"),
        *_difference(_part(learning, "off_policy"), "log-probs of engine and trainer, all tokens"),
        ("critic: value loss, explained variance / at the end", _joined(critic, _CRITIC)),
    ]


def _difference(of: Mapping[str, Any], what: str) -> list[tuple[str, str | None]]:
    return [
        (f"{what}: apart, mean / largest", _joined(of, ("mean_abs", "max_abs"))),
        (f"{what}: KL by k1 / by k3 / perplexity ratio", _joined(of, ("kl_k1", "kl_k3", "perplexity_ratio"))),
        (f"{what}: effective sample size", _percent(of.get("effective_sample_size"), 1)),
        (f"{what}: steps with an alarm", _number(of.get("alarms"), 0)),
    ]


def _refresh_text(refresh: Mapping[str, Any]) -> str | None:
    if not refresh.get("count"):
        return None
    pause, most = refresh.get("pause_mean_s"), refresh.get("pause_max_s")
    share = _percent(refresh.get("pause_share_of_step"), 1)
    parts = [
        f"{refresh['count']} x {refresh['mode']}",
        f"pause {1000 * pause:.0f} ms (largest {1000 * most:.0f} ms)"
        if pause is not None and most is not None
        else None,
        f"{share} of a step" if share else None,
        f"{refresh.get('tokens_recomputed') or 0:,} tokens recomputed",
        f"{refresh.get('tokens_discarded') or 0:,} discarded",
    ]
    return ", ".join(part for part in parts if part)


def _restarts_text(summary: Mapping[str, Any]) -> str | None:
    engines, trainer = _part(summary, "engines").get("restarts"), _part(summary, "trainer").get("restarts")
    return None if engines is None or trainer is None else f"{engines} / {trainer}"


def _write_header(figure: Figure, run: RunContext, summary: Mapping[str, Any]) -> None:
    figure.text(0.055, 0.953, run.run_id, fontsize=19, color=_INK, weight="bold")
    if summary.get("status") not in (None, "completed"):
        figure.text(0.98, 0.953, summary["status"], fontsize=19, color=_RED, weight="bold", ha="right")
    wait, speed = _percent(summary.get("train_wait_ratio")), _number(summary.get("tokens_per_s"), 0)
    step, wall = _number(summary.get("step_time_s"), 2), _number(summary.get("wall_s"), 0)
    parts = [
        run.config.mode,
        f"{step} s a step" if step else None,
        f"{wait} of it waiting" if wait else None,
        f"{speed} tokens/s" if speed else None,
        f"{wall} s in all" if wall else None,
    ]
    figure.text(0.055, 0.921, "   |   ".join(part for part in parts if part), fontsize=13, color=_INK)
    if summary.get("error"):
        figure.text(0.055, 0.893, _one_line(str(summary["error"]), 150), fontsize=11, color=_RED)


def _draw_reward(ax: Axes, metrics: Metrics) -> bool:
    steps, rewards = series(metrics.steps, "step", "reward_mean")
    if not steps:
        return False
    window = max(1, min(9, len(steps) // 4))
    ax.plot(steps, rewards, color=_LIGHT_BLUE, linewidth=1.2, marker="o", markersize=2.5, label="each step")
    if window > 1:
        ax.plot(steps, smoothed(rewards, window), color=_BLUE, linewidth=2.4, label=f"mean of {window} steps")
    ax.set_xlabel("step")
    ax.set_ylabel("mean reward")
    _legend(ax, "lower right")
    return True


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean; near the ends over the values that there are."""
    left, right = (window - 1) // 2, window // 2 + 1
    return [float(np.mean(values[max(0, i - left) : i + right])) for i in range(len(values))]


def _draw_step_time(ax: Axes, metrics: Metrics) -> bool:
    names = ("train_wait_s", "train_s", "publish_s")
    whole = [r for r in metrics.steps if all(isinstance(r.get(name), int | float) for name in names)]
    if not whole:
        return False
    steps = [r["step"] for r in whole]
    bottom = np.zeros(len(whole))
    for name, label, color in zip(
        names, ("waiting for data", "training", "publishing weights"), (_ORANGE, _BLUE, _GREEN), strict=True
    ):
        height = np.array([r[name] for r in whole], dtype=float)
        ax.bar(steps, height, bottom=bottom, width=1.0, color=color, label=label, linewidth=0)
        bottom += height
    # The first step waits for a cold pipeline; it must not flatten all the others.
    rest = bottom[1:] if len(bottom) > 1 else bottom
    top = float(rest.max()) * 1.35 or 1.0
    if bottom[0] > top:
        ax.annotate(
            f"step {steps[0]}: {bottom[0]:.1f} s", (steps[0], top), (8, -14), textcoords="offset points", color=_MUTED
        )
    ax.set_xlim(steps[0] - 1, steps[-1] + 1)
    ax.set_ylim(0, top)
    ax.set_xlabel("step")
    ax.set_ylabel("seconds")
    _legend(ax, "upper right")
    return True


def _draw_evaluation(ax: Axes, summary: Mapping[str, Any]) -> bool:
    evaluation = _part(summary, "evaluation")
    before, after, n = (evaluation.get(key) for key in ("before", "after", "n"))
    if before is None or after is None:
        return False
    bars = ax.bar(["start model", "trained model"], [before, after], color=[_GREY, _BLUE], width=0.55)
    ax.bar_label(bars, [score_text(before), score_text(after)], padding=4, fontsize=15, weight="bold", color=_INK)
    if min(before, after) >= 0 and max(before, after) <= 1:
        ax.set_ylim(0, 1.12)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    else:
        ax.margins(y=0.15)
    ax.grid(False, axis="x")
    ax.tick_params(axis="x", labelsize=11.5)
    p_value = evaluation.get("p_value")
    detail = f"{n} prompts" + (f", {p_text(p_value)} (exact, paired)" if p_value is not None else "")
    ax.set_xlabel(detail, fontsize=11)
    ax.set_ylabel("mean reward")
    return True


def _draw_queue(ax: Axes, metrics: Metrics) -> bool:
    times, flying = series(metrics.queue, "t", "in_flight")
    queue_times, queued = series(metrics.queue, "t", "queued")
    if not times and not queue_times:
        return False
    ax.plot(times, flying, color=_ORANGE, linewidth=1.3, drawstyle="steps-post", label="in generation")
    ax.plot(queue_times, queued, color=_BLUE, linewidth=1.3, drawstyle="steps-post", label="in the training queue")
    ax.set_ylim(0, max([*flying, *queued, 1]) * 1.25)
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("groups")
    _legend(ax, "upper right")
    return True


def _draw_staleness(ax: Axes, groups: list[dict[str, Any]], summary: Mapping[str, Any]) -> bool:
    counts = Counter(
        int(g["staleness"]) for g in groups if g.get("fate") == "trained" and g.get("staleness") is not None
    )
    if not counts:
        return False
    ages = range(max(counts) + 1)
    bars = ax.bar(ages, [counts[age] for age in ages], color=_BLUE, width=0.7)
    ax.bar_label(bars, [f"{counts[age]}" if counts[age] else "" for age in ages], padding=2, color=_INK)
    bound = _part(summary, "staleness").get("bound")
    right = max(counts)
    if bound is not None:
        right = max(right, bound)
        ax.axvline(bound + 0.5, color=_ORANGE, linestyle="--", linewidth=1.6, label=f"bound: {bound:g}")
        _legend(ax, "upper right")
    ax.set_xlim(-0.6, right + 1)
    ax.set_xticks(range(int(right) + 1))
    ax.margins(y=0.14)
    ax.set_xlabel("versions between oldest token and training")
    ax.set_ylabel("groups")
    return True


def _draw_lengths(
    ax: Axes, profile: list[dict[str, Any]], groups: list[dict[str, Any]], summary: Mapping[str, Any]
) -> bool:
    trained = [(g["predicted_length"], float(np.mean(g["lengths"]))) for g in groups if g.get("lengths")]
    held_out = [(p["predicted"], p["mean"]) for p in profile if p.get("held_out")]
    if not trained and not held_out:
        return False
    right, top = (max(values) for values in zip(*trained, *held_out, strict=True))
    ax.plot([0, right, top], [0, right, top], color=_GREY, linewidth=1.2, linestyle="--", label="exact prediction")
    if trained:
        ax.scatter(
            [x for x, _ in trained],
            [y for _, y in trained],
            s=9,
            color=_LIGHT_BLUE,
            label="during training (mean of a group)",
        )
    if held_out:
        rank = _number(_part(summary, "lengths").get("spearman"), 2)
        label = "start model, held out" + (f" (rank corr. {rank})" if rank else "")
        xs, ys = [x for x, _ in held_out], [y for _, y in held_out]
        ax.scatter(xs, ys, s=22, color=_BLUE, edgecolor="white", linewidth=0.5, label=label)
    ax.set_xlim(0, right * 1.08)
    ax.set_ylim(0, top * 1.35)  # room for the legend
    ax.set_xlabel("predicted tokens")
    ax.set_ylabel("actual tokens")
    _legend(ax, "upper left")
    return True


def _style(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=13, color=_INK, weight="bold", pad=9)
    ax.grid(True, color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(_GREY)
    ax.tick_params(colors=_INK, labelsize=10, length=3)
    ax.xaxis.label.set(color=_INK, size=10.5)
    ax.yaxis.label.set(color=_INK, size=10.5)


def _legend(ax: Axes, place: Literal["upper left", "upper right", "lower right"]) -> None:
    ax.legend(loc=place, fontsize=9.5, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=_INK)


def _read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file; none if it is missing or was cut off by the end of the run."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (FileNotFoundError, pa.ArrowInvalid):
        return []
    return rows


def _part(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the summary; empty if the run did not get so far."""
    return summary.get(name) or {}


def _number(value: float | None, digits: int, unit: str = "") -> str | None:
    return None if value is None else f"{value:,.{digits}f}{unit}"


def _percent(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}%}"


def _joined(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    if all(values.get(name) is None for name in names):
        return None
    return " / ".join("-" if values.get(name) is None else f"{values[name]:.3g}" for name in names)


def _one_line(text: str, limit: int = 500) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
