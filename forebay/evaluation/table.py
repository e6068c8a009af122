"""The evaluation as Markdown, for people: the comparison, and examples that can be read at a glance."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forebay.data.maze import Maze, cell_name, read_prompt
from forebay.evaluation.compare import Comparison, verdict

if TYPE_CHECKING:
    from forebay.evaluation.stage import EvaluationResult

_LONGEST_TEXT, _LONGEST_WALK = 1200, 60
"""Characters; cells."""


def evaluation_markdown(result: "EvaluationResult") -> str:
    """Tables and examples of one evaluation."""
    lines = [
        "| | start model | trained model |",
        "| --- | ---: | ---: |",
        f"| mean reward, {result.n} test prompts | {score_text(result.before)} | **{score_text(result.after)}** |",
        f"| mean response length (tokens) | {result.mean_length_before:.1f} | {result.mean_length_after:.1f} |",
        f"| responses cut at the limit | {result.truncated_before} | {result.truncated_after} |",
        *_sampled(result),
    ]
    sizes = sorted(result.by_size.items(), key=lambda item: int(item[0]))
    lines += [f"| mazes {s} x {s} ({n} prompts) | {score_text(b)} | {score_text(a)} |" for s, (n, b, a) in sizes]
    lines += [
        "",
        f"**{verdict(result.p_value, result.before, result.after)}**: {result.gained} prompts gained, {result.lost} "
        f"lost; exact paired sign test: {p_text(result.p_value)}; difference {result.after - result.before:+.3f}, 95% "
        f"bootstrap interval {result.interval[0]:+.3f} to {result.interval[1]:+.3f}.",
        "",
        f"{_how(result)} Final answers found by: {_rules(result.rules_before)}; trained: {_rules(result.rules_after)}. "
        f"To repeat it: `forebay evaluate config.yaml --model model` in this run's folder (SHA-256 of test.parquet: "
        f"`{result.test_sha256[:16]}`).",
    ]
    if result.by_tag:
        lines += ["", "| tag | prompts | start | trained | gained | lost | p |", f"| --- |{' ---: |' * 6}"]
        lines += [_tag(tag, one) for tag, one in result.by_tag.items()]
    if result.left_out:
        lines += ["", f"{result.left_out} prompts could not be scored and are left out of both sides."]
    if result.examples:
        lines += ["", "### Examples", "", "In turn, as far as there are such: gained, lost, good in both, bad in both."]
        lines += [line for number, example in enumerate(result.examples, 1) for line in _example(number, example)]
    return "\n".join(lines) + "\n"


def _sampled(result: "EvaluationResult") -> list[str]:
    before, after = result.sampled_before, result.sampled_after
    if before is None or after is None:
        return []
    lines = [f"| pass@{k} | {score_text(b)} | {score_text(after.pass_at[k])} |" for k, b in before.pass_at.items()]
    return [*lines, f"| maj@{result.samples} | {score_text(before.majority)} | {score_text(after.majority)} |"]


def _tag(tag: str, one: Comparison) -> str:
    name = tag.replace("|", "\\|")
    cells = name, one.n, score_text(one.before), score_text(one.after), one.gained, one.lost, f"{one.p_value:.2g}"
    return f"| {' | '.join(map(str, cells))} |"


def _how(result: "EvaluationResult") -> str:
    if result.temperature == 0:
        return "Greedy."
    return f"{result.samples} responses to a prompt at temperature {result.temperature:g}: the mean reward is avg@k."


def _rules(rules: Mapping[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in rules.items()) or "none"


def score_text(reward: float) -> str:
    """A mean reward as a percentage, if it can be one."""
    return f"{reward:.1%}" if 0 <= reward <= 1 else f"{reward:.3f}"


def p_text(p_value: float) -> str:
    """`p = 0.03`, `p = 2e-17`."""
    return f"p = {p_value:.2g}" if p_value > 0 else "p < 1e-300"


def draw_maze(maze: Maze, width: int = 4) -> str:
    """The maze with its walls, `S` and `G`; rows and columns carry the names that the cells have."""
    side = math.isqrt(len(maze.passages))
    rule = "-" * (width - 1)
    lines = ["   " + "".join(f"{cell_name((0, column))[0]:^{width}}" for column in range(side)).rstrip()]
    for row in range(side):
        above = "".join(
            "+" + (" " * (width - 1) if (row - 1, column) in maze.passages[row, column] else rule)
            for column in range(side)
        )
        cells = ""
        for column in range(side):
            open_left = (row, column - 1) in maze.passages[row, column]
            mark = "S" if (row, column) == maze.start else "G" if (row, column) == maze.goal else " "
            cells += (" " if open_left else "|") + f"{mark:^{width - 1}}"
        lines += [f"  {above}+", f"{row + 1} {cells}|"]
    return "\n".join([*lines, "  " + ("+" + rule) * side + "+"])


def mark_walk(maze: Maze, response: str) -> str:
    """The walk cell by cell, with `#` before each step that goes through a wall."""
    names = [response[at : at + 2] for at in range(0, len(response), 2)]
    more = f" [... {len(names) - _LONGEST_WALK} more]" if len(names) > _LONGEST_WALK else ""
    names = names[:_LONGEST_WALK]
    open_to = {cell_name(cell): set(map(cell_name, near)) for cell, near in maze.passages.items()}
    steps = [
        name if at == 0 or name in open_to.get(names[at - 1], ()) else f"# {name}" for at, name in enumerate(names)
    ]
    return (" ".join(steps) or "(nothing)") + more


def _example(number: int, example: Mapping[str, Any]) -> Sequence[str]:
    title = f"**{number}.** reward {example['before_reward']:g} before, {example['after_reward']:g} after"
    try:
        maze = read_prompt(example["prompt"])
        if math.isqrt(len(maze.passages)) ** 2 != len(maze.passages):
            raise ValueError("not a square")
    except ValueError:
        parts = {"prompt": example["prompt"], "before": example["before"], "after": example["after"]}
        body = [f"{name:>6}: {_shorten(text)}" for name, text in parts.items()]
    else:
        title += " (`#`: through a wall)"
        body = [
            draw_maze(maze),
            "",
            f"before: {mark_walk(maze, example['before'])}",
            f" after: {mark_walk(maze, example['after'])}",
        ]
    fence = "```"
    while any(fence in line for line in body):
        fence += "`"
    return ["", title, "", fence + "text", *body, fence]


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} [... {len(text) - _LONGEST_TEXT} more]"
