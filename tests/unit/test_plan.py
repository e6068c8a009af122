"""Plans: which choices are compared, what they say, and the page."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli import app
from forebay.config import RunConfig, parse_config
from forebay.errors import UserError
from forebay.simulation import plan as planning
from forebay.simulation.bound import bound
from forebay.simulation.model import Scenario
from forebay.simulation.plan import Choice, Line, Plan, engine_devices, make_plan
from forebay.simulation.plan_page import COLUMNS, advice, cells, check_page, left_out, page, write_page
from forebay.simulation.run import SimulationResult, simulate
from forebay.simulation.scenario import scenario_of

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"train_prompts": 400},
    "lengths": {"assumed": {"median": 60, "prompt_tokens": 20}},
    "schedule": {"minibatch_prompts": 2, "minibatch_slack": 1},
    "generation": {"group_size": 4, "max_new_tokens": 128, "max_num_seqs": 16},
    "control": {"batch_groups": 8},
}


def profile(**sections: Any) -> RunConfig:
    """`SMALL` with sections merged in."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for name, change in sections.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return parse_config(values, "test")


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(profile(), 4)


@pytest.mark.parametrize("devices", [1, 0, -2])
def test_too_few_devices_are_refused_in_one_line(devices: int) -> None:
    with pytest.raises(
        UserError, match=f"^--devices {devices}: a run needs 2 at least, 1 for an engine and one for .*$"
    ):
        make_plan(profile(), devices)


def test_engines_of_several_devices_leave_whole_devices_to_the_trainer() -> None:
    args = ["--enforce-eager", "--tensor-parallel-size=2", "--pipeline-parallel-size", "1"]
    config = profile(generation={"extra_args": args})
    assert engine_devices(config) == 2
    assert list(planning._splits(config, 7)) == [(1, 5), (2, 3), (3, 1)]
    with pytest.raises(UserError, match="--devices 2: a run needs 3 at least"):
        make_plan(config, 2)


def test_the_table_is_sorted_and_covers_modes_policies_and_bounds(made: Plan) -> None:
    times = [line.result.step_time_s for line in made.lines]
    assert times == sorted(times)
    assert list(made.bounds) == ["1 + 3", "2 + 2", "3 + 1"]
    choices = [line.choice for line in made.lines]
    assert len(set(choices)) == len(choices)
    assert {choice.mode for choice in choices} == {"sync", "one_step_off", "fully_async"}
    for mode in ("sync", "one_step_off", "fully_async"):
        best = {c.split for c in choices if c.mode == mode and not c.usual}
        assert len(best) == 1, "what varies is tried on one split"
        assert {c.policy for c in choices if c.mode == mode} == {"fifo", "asp", "balanced", "longest_first"}
    assert {c.max_staleness for c in choices if c.mode == "fully_async"} == {1, 2, 4, 8}
    assert {c.max_staleness for c in choices if c.mode == "sync"} == {0}
    for line in made.lines:
        assert line.result.staleness.max <= line.choice.max_staleness


def test_a_line_is_what_its_profile_simulates_to(made: Plan) -> None:
    line = next(line for line in made.lines if line.choice == Choice(2, 2, "fully_async", "balanced", 4))
    config = profile(generation={"engines": 2}, training={"steps": made.steps}, schedule={"policy": "balanced"})
    scenario = scenario_of(config, prompts=round(planning.SPARE * made.steps * 8))
    trainer = replace(scenario.trainer, per_token_s=scenario.trainer.per_token_s / 2)
    again = simulate(replace(scenario, trainer=trainer, warm_up=made.steps // 4))
    assert line.result.step_times.tolist() == again.step_times.tolist()


def test_no_choice_is_looked_at_before_its_first_wave_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios: list[Scenario] = []

    def watched(scenario: Scenario, **options: Any) -> SimulationResult:
        scenarios.append(scenario)
        return simulate(scenario, **options)

    monkeypatch.setattr(planning, "simulate", watched)
    make_plan(profile(control={"batch_groups": 2, "max_staleness": 16, "work_in_progress": 15}), 2)
    assert {(scenario.warm_up, scenario.rules.steps) for scenario in scenarios} >= {(10, 40), (15, 45)}
    for scenario in scenarios:
        wave = min(scenario.rules.work_in_progress or 1, scenario.rules.max_staleness + 1)
        assert scenario.warm_up >= wave
        assert scenario.rules.steps >= 3 * wave


def test_the_trainer_is_faster_with_more_ranks_but_for_its_fixed_time() -> None:
    bounds = make_plan(profile(), 3).bounds
    one, two = bounds["2 + 1"].train_s, bounds["1 + 2"].train_s
    fixed = scenario_of(profile()).trainer.fixed_s
    assert two - fixed == pytest.approx((one - fixed) / 2)
    alone = bound(scenario_of(profile(training={"steps": planning.STEPS}), prompts=round(1.25 * planning.STEPS * 8)))
    assert one == pytest.approx(alone.train_s)


def test_splits_that_can_only_be_slow_are_not_simulated() -> None:
    # Long responses, quick trainer: rollout time goes as 1 / engines.
    made = make_plan(profile(generation={"max_num_seqs": 4}, data={"train_prompts": 200}), 8)
    lowest = min(value.step_time_s for value in made.bounds.values())
    shown = {line.choice.split for line in made.lines}
    assert shown < set(made.bounds)
    assert len(shown) <= planning.SPLITS
    assert all(made.bounds[split].step_time_s <= planning.FAR * lowest for split in shown)
    best_of_others = min(value.step_time_s for split, value in made.bounds.items() if split not in shown)
    assert best_of_others >= max(made.bounds[split].step_time_s for split in shown)
    assert "1 + 7" in left_out(made)


def test_the_budget_ends_a_plan_early_but_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BUDGET", 3 * planning.STEPS * 8 * 4)
    made = make_plan(profile(), 4)
    assert len(made.lines) == 3
    assert made.skipped > 0
    assert f"{made.skipped} more choices" in left_out(made)


def test_modes_that_the_profile_forbids_are_left_out() -> None:
    made = make_plan(profile(control={"batch_groups": 8, "require_batches": 2}), 2)
    assert {line.choice.mode for line in made.lines} == {"one_step_off", "fully_async"}
    assert made.skipped > 0


def test_a_choice_that_gets_stuck_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(scenario: Scenario, **options: Any) -> Any:
        if scenario.rules.max_staleness == 0:
            raise UserError("simulation: no group is generated within control.group_deadline_s (1 s): raise it")
        return simulate(scenario, **options)

    monkeypatch.setattr(planning, "simulate", stuck)
    made = make_plan(profile(), 2)
    assert {line.choice.mode for line in made.lines} == {"one_step_off", "fully_async"}
    assert made.skipped > 0


def test_a_plan_of_nothing_but_stuck_choices_says_why() -> None:
    with pytest.raises(UserError, match=r"none of the modes .*within control.group_deadline_s \(0.1 s\)"):
        make_plan(profile(control={"batch_groups": 8, "group_deadline_s": 0.1}), 2)


def test_the_same_plan_again_is_the_same(made: Plan) -> None:
    again = make_plan(profile(), 4)
    assert [cells(line) for line in again.lines] == [cells(line) for line in made.lines]
    assert advice(again) == advice(made)


def fake(made: Plan, *values: tuple[Choice, float, float], stale: dict[Choice, int] | None = None) -> Plan:
    """A plan with these (choice, step time, mean staleness); `stale` of 100 finished groups were dropped."""
    model, lines = made.lines[0].result, []
    for choice, time, age in values:
        dropped = (stale or {}).get(choice, 0)
        ages, fates = replace(model.staleness, mean=age), {"trained": 100 - dropped, "stale": dropped}
        lines.append(Line(choice, replace(model, step_time_s=time, staleness=ages, fates=fates)))
    return replace(made, lines=sorted(lines, key=lambda line: line.result.step_time_s))


def test_the_advice_is_fast_then_fresh_then_what_the_profile_has(made: Plan) -> None:
    usual = Choice(2, 2, "fully_async", "balanced", 4, usual=True)
    other = Choice(2, 2, "fully_async", "fifo", 4)
    loose = Choice(2, 2, "fully_async", "balanced", 8)
    quick = Choice(3, 1, "fully_async", "balanced", 4, usual=True)
    assert fake(made, (usual, 10.1, 1.05), (other, 10.0, 1.0), (loose, 10.0, 2.0)).best.choice == usual
    assert fake(made, (usual, 10.1, 1.3), (other, 10.0, 1.0)).best.choice == other
    assert fake(made, (usual, 10.0, 1.0), (quick, 9.0, 3.0)).best.choice == quick
    sync = Choice(2, 2, "sync", "longest_first", 0)
    text = advice(fake(made, (usual, 10.0, 1.0), (sync, 25.0, 0.0)))
    assert text.startswith("Take 2 engines and 2 trainer ranks, fully_async, policy balanced, staleness bound 4: 10 s")
    assert "sync at its best takes 2.5 times as long" in text
    assert "\n" not in text


def test_a_choice_that_drops_groups_is_not_taken_for_being_fresh(made: Plan) -> None:
    tight, loose = Choice(2, 2, "fully_async", "balanced", 1, usual=True), Choice(2, 2, "fully_async", "balanced", 8)
    values = (tight, 9.9, 0.5), (loose, 10.0, 2.0)
    assert fake(made, *values).best.choice == tight
    dropping = fake(made, *values, stale={tight: 2})
    assert dropping.best.choice == loose
    assert dropping.lines[0].dropped == pytest.approx(0.02)
    assert "without dropping groups" in advice(dropping)
    assert fake(made, *values, stale={tight: 2, loose: 3}).best.choice == tight


class Outline(HTMLParser):
    """Checks nesting; collects rows and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {value}" for name, value in attrs if name == "src" or (name == "href" and tag != "use")]
        self.loads += [
            f"{name} {value}" for name, value in attrs if name == "xlink:href" and not str(value).startswith("#")
        ]
        if tag == "tr":
            self.rows.append([])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "meta" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_the_page_stands_alone_and_has_every_row(made: Plan) -> None:
    text = page(replace(made, name="<b>&"))
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert not outline.open
    assert not outline.loads
    assert "<script" not in text
    assert "@import" not in text
    assert "url(http" not in text
    assert outline.rows == [list(COLUMNS), *(list(cells(line)) for line in made.lines)]
    assert "&lt;b&gt;&amp;" in text
    assert all(note.split("(")[0].replace("'", "&#x27;") in text for note in made.assumptions)


def test_a_page_that_cannot_be_written_is_one_line(made: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--html .*: cannot be written \(.*\)$"):
        write_page(made, tmp_path / "absent" / "plan.html")


def test_looking_whether_a_page_can_be_written_changes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old.html"
    old.write_text("x")
    check_page(old)
    check_page(tmp_path / "new.html")
    assert (old.read_text(), list(tmp_path.iterdir())) == ("x", [old])
    with pytest.raises(UserError, match=r"^--html .*: cannot be written \(.*\)$"):
        check_page(tmp_path)


def test_the_command_prints_the_plan_and_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(profile().model_dump_json())  # JSON is YAML
    done = CliRunner().invoke(app, ["plan", str(path), "--devices", "2", "--html", str(tmp_path / "plan.html")])
    assert done.exit_code == 0, done.output
    assert "Take 1 engine and 1 trainer rank, " in done.output
    assert all(name in done.output for name in (*COLUMNS, "one_step_off", "longest_first", "taken for granted"))
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    absent = ["--html", str(tmp_path / "absent" / "plan.html")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "make_plan", lambda *_: pytest.fail("simulated first"))
        early = CliRunner().invoke(app, ["plan", str(path), "--devices", "2", *absent])
    assert (early.exit_code, early.output.count("\n")) == (2, 1), early.output
    assert "plan.html: cannot be written (No such file or directory)" in early.output
    refused = CliRunner().invoke(app, ["plan", str(path), "--devices", "1"])
    assert refused.exit_code == 2
    assert refused.output.count("\n") == 1
