"""A plan for people: the table, the advice in one line, and a page that stands alone.

Invariants: nothing is computed here that the plan does not hold; the page loads nothing from anywhere.
"""

import html
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forebay.errors import UserError
from forebay.simulation.plan import ALIKE, DROPPED, Line, Plan

COLUMNS = (
    "GUs + TU",
    "mode",
    "policy",
    "bound",
    "step time",
    "x light",
    "binds",
    "trainer idle",
    "slots idle",
    "staleness",
    "dropped",
)
"""`x light`: step time over the speed of light; `binds`: its larger term. Staleness: mean / 95% / max. Dropped: share
of groups that were too old."""
NEAR = 1.05
"""Times the bound: close enough to call the bottleneck by its name."""
MUCH = 0.2
"""Share of the engines' time that must be named before all else."""
NAMED, TICKS = 6, 10
"""Splits that are named at most, in the text and on the axis."""
TEXT_COLUMNS = ("GUs + TU", "mode", "policy", "binds")
COLOURS = {"sync": "#e08a1e", "one_step_off": "#2f9e6e", "fully_async": "#1f6fb2"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.advice { background: #eef5fb; border-left: 4px solid #1f6fb2; padding: .8rem 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7eb; }
th.text, td.text { text-align: left; } tr.best { background: #eef5fb; font-weight: 600; }
svg { max-width: 100%; height: auto; }
"""


def cells(line: Line) -> tuple[str, ...]:
    """One row of the table, as `COLUMNS`."""
    choice, result = line.choice, line.result
    ages = result.staleness
    return (
        choice.split,
        choice.mode,
        choice.policy,
        f"{choice.max_staleness:g}",
        seconds(result.step_time_s),
        f"{result.over_bound:.2f}",
        result.bound.binding,
        f"{result.train_wait_ratio:.0%}",
        f"{result.slots_idle:.0%}",
        f"{ages.mean:.2f} / {ages.p95} / {ages.max}",
        f"{line.dropped:.1%}",
    )


def advice(plan: Plan) -> str:
    """Which one to take, and why."""
    best, choice = plan.best, plan.best.choice
    ages = best.result.staleness
    bound = f", staleness bound {choice.max_staleness:g}" if choice.mode == "fully_async" else ""
    text = (
        f"Take {_count(choice.engines, 'engine')} and {_count(choice.ranks, 'trainer rank')}, {choice.mode}, policy "
        f"{choice.policy}{bound}: {seconds(best.result.step_time_s)} a step, {best.result.over_bound:.2f} x the "
        f"speed of light, mean staleness {ages.mean:.1f}"
    )
    return f"{text}; {'; '.join(_reasons(plan))}."


def _reasons(plan: Plan) -> list[str]:
    best = plan.best
    reasons = ["nothing else is as fast"]
    if len(plan.alike) > 1:
        reasons = [
            f"of {len(plan.alike)} choices within {ALIKE - 1:.0%} of the fastest none makes clearly fresher samples"
        ]
        if best.dropped <= DROPPED and any(line.dropped > DROPPED for line in plan.alike):
            reasons[0] += " without dropping groups, the longest first"
    for mode in COLOURS:
        others = [line for line in plan.lines if line.choice.mode == mode]
        if mode != best.choice.mode and others:
            times = others[0].result.step_time_s / best.result.step_time_s
            reasons.append(f"{mode} at its best takes {times:.1f} times as long")
    return [*reasons, _limit(best)]


def _limit(line: Line) -> str:
    """What keeps this choice from being faster."""
    result = line.result
    paused = f"weight refreshes stop the engines for {result.engine_paused:.0%} of the time (control.refresh)"
    if result.engine_paused > MUCH:
        return paused
    if result.over_bound < NEAR:
        if result.bound.binding == "train":
            return "the trainer is the bottleneck: only more of its ranks would help"
        return "the engines are the bottleneck: only more engines or slots would help"
    if line.choice.mode != "fully_async":
        return "its barrier costs the rest"
    if result.slots_idle > 1 - 1 / NEAR:
        return (
            f"{result.slots_idle:.0%} of the slots stand empty: too few groups are outstanding for them; a larger "
            "batch or staleness bound would fill them"
        )
    if result.engine_paused > 1 - 1 / NEAR:
        return paused
    return "the trainer waits for the longest responses of a batch"


def left_out(plan: Plan) -> str:
    """What was not simulated, and why; empty if everything was."""
    shown = {line.choice.split for line in plan.lines}
    others = {name: bound.step_time_s for name, bound in plan.bounds.items() if name not in shown}
    parts = []
    if others:
        named = [f"{name} ({seconds(value)})" for name, value in sorted(others.items(), key=lambda item: item[1])]
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        parts.append(
            f"Not simulated, since others can be faster: {', '.join(named[:NAMED])}{more} at the speed of light."
        )
    if plan.skipped:
        why = "they take too long, get stuck, or the profile forbids them"
        parts.append(f"{plan.skipped} more choices were left out: {why}.")
    return " ".join(parts)


def seconds(value: float) -> str:
    """Three digits."""
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def check_page(path: Path) -> None:
    """Raises `UserError` if no page can be written there; leaves nothing behind."""
    try:
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror})") from None


def write_page(plan: Plan, path: Path) -> None:
    """One HTML file. Raises `UserError` if it cannot be written."""
    try:
        path.write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror})") from None


def page(plan: Plan) -> str:
    """The whole page."""
    title = html.escape(f"{plan.name}: plan for {plan.devices} devices")
    notes = "".join(f"<li>{html.escape(text)}</li>" for text in plan.assumptions)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'<p class="advice">{html.escape(advice(plan))}</p>{_plots(plan)}'
        f"<h2>All simulated choices, {plan.steps} steps each or more</h2>{_table(plan)}"
        f"<p>{html.escape(left_out(plan))}</p>"
        f"<h2>Taken for granted</h2><ul>{notes}</ul></body></html>\n"
    )


def _table(plan: Plan) -> str:
    def row(tag: str, texts: Sequence[str], kind: str = "") -> str:
        named = zip(COLUMNS, texts, strict=True)
        inner = "".join(
            f"<{tag}{' class=text' if name in TEXT_COLUMNS else ''}>{html.escape(text)}</{tag}>" for name, text in named
        )
        return f"<tr{kind}>{inner}</tr>"

    rows = [row("td", cells(line), " class=best" if line is plan.best else "") for line in plan.lines]
    return f'<div class="scroll"><table><thead>{row("th", COLUMNS)}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _plots(plan: Plan) -> str:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    speed, staleness = figure.subplots(1, 2)
    _draw_splits(speed, plan)
    _draw_staleness(staleness, plan)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_splits(ax: Axes, plan: Plan) -> None:
    """Each mode's best choice on every split, and the bound."""
    splits = list(plan.bounds)
    places = {split: place for place, split in enumerate(splits)}
    ax.plot(range(len(splits)), [plan.bounds[split].step_time_s for split in splits], "k:", label="speed of light")
    for mode, colour in COLOURS.items():
        own: dict[str, float] = {}
        for line in plan.lines[::-1]:
            if line.choice.mode == mode:
                own[line.choice.split] = line.result.step_time_s
        ordered = sorted(own, key=lambda split: places[split])
        ax.plot([places[s] for s in ordered], [own[s] for s in ordered], color=colour, marker="o", ms=5, label=mode)
    every = -(-len(splits) // TICKS)
    ax.set_xticks(range(0, len(splits), every), splits[::every], fontsize=8)
    ax.set_xlabel("engines + trainer ranks")
    ax.set_title("Step time by split, s", loc="left", fontsize=11)
    ax.set_ylim(0, 1.25 * max(line.result.step_time_s for line in plan.lines))
    ax.legend(fontsize=8, frameon=False)


def _draw_staleness(ax: Axes, plan: Plan) -> None:
    """Every choice: speed against staleness."""
    for mode, colour in COLOURS.items():
        own = [line.result for line in plan.lines if line.choice.mode == mode]
        ax.scatter([r.staleness.mean for r in own], [r.step_time_s for r in own], color=colour, s=22, label=mode)
    best = plan.best.result
    ax.scatter([best.staleness.mean], [best.step_time_s], s=160, facecolors="none", edgecolors="black", label="taken")
    ax.set_xlabel("mean staleness, versions")
    ax.set_title("Speed against staleness: step time, s", loc="left", fontsize=11)
    ax.set_ylim(0)
    ax.legend(fontsize=8, frameon=False)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
