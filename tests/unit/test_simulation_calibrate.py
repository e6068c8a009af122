"""Calibration: a run whose costs are known (a simulated one) is recorded as a run is, and the costs are found again."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from forebay.cli import app
from forebay.config import RunConfig, load_profile, parse_config
from forebay.config.sections import AssumedLengthsConfig
from forebay.control.recorder import LEDGER
from forebay.control.rules import Rules, rules_of
from forebay.errors import UserError
from forebay.simulation.calibrate import Calibration, calibrate
from forebay.simulation.fit import Lives, _progress
from forebay.simulation.kv import capacity, token_bytes
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, lognormal
from forebay.simulation.run import simulate
from forebay.simulation.scenario import assumptions, scenario_of

PROFILES = Path(__file__).parents[2] / "profiles"
ENGINE = EngineModel(a=0.008, b=5e-5, c=1e-7, slots=64, prefill_s=1e-4, pause_s=0.4)


def make_scenario(lengths, rules, longest=2000, **changes):
    base = dict(steps=30, batch_groups=16, group_size=8, sync_every=1, max_staleness=4, work_in_progress=2.0)
    base |= dict(max_concurrent_samples=64, max_new_tokens=longest)
    defaults = dict(
        rules=Rules(**(base | rules)),
        streaming=False,
        engines=2,
        engine=ENGINE,
        trainer=TrainerModel(0.5, 2e-5, 0.2),
        workload=lognormal(400, 8, lengths, longest, 1),
        order=[[[row, row + 1]] for row in range(0, 400, 2)],
        reward_s=0.05,
        refresh_s=0.3,
        teaching=0.7,
    )
    return Scenario(**(defaults | changes))


LONG = AssumedLengthsConfig(median=300, prompt_tokens=150)
SHORT = AssumedLengthsConfig(median=18, prompt_sd=0.6, within_sd=0.5, prompt_tokens=70)


def record(scenario, folder):
    """A run's folder from a simulation."""
    folder.mkdir(parents=True, exist_ok=True)
    result = simulate(scenario, folder)
    settings = {"generation": {"max_num_seqs": scenario.engine.slots}, "model": {"dtype": "float32"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return result


def calibrated(scenario, found):
    """The scenario with the costs that were found."""
    costs = found.engine
    engine = replace(scenario.engine, a=costs.a, b=costs.b, c=costs.c, prefill_s=costs.prefill_s, pause_s=costs.pause_s)
    return replace(
        scenario,
        engine=engine,
        trainer=found.trainer,
        reward_s=found.reward_s + costs.latency_s,
        refresh_s=found.refresh_s,
        teaching=found.teaching,
    )


# ---- costs are found again


@pytest.mark.parametrize(
    "rules",
    [
        dict(max_staleness=0, work_in_progress=1.0),
        dict(max_staleness=1, work_in_progress=2.0, wait_for_oldest=True),
    ],
)
def test_costs_of_a_run_behind_barriers_are_found_again(rules, tmp_path):
    """There the number of active responses varies from all slots to one."""
    scenario = make_scenario(AssumedLengthsConfig(), rules | dict(steps=20), longest=8192)
    record(scenario, tmp_path)
    found = calibrate(tmp_path)
    for name in ("a", "b", "c", "pause_s"):
        assert getattr(found.engine, name) == pytest.approx(getattr(ENGINE, name), rel=0.05), name
    assert found.engine.prefill_s == pytest.approx(ENGINE.prefill_s, rel=0.1)
    assert found.engine.latency_s == 0.0
    for name in ("fixed_s", "per_token_s", "publish_s"):
        assert getattr(found.trainer, name) == pytest.approx(getattr(scenario.trainer, name), rel=0.02), name
    assert found.reward_s == pytest.approx(0.05, abs=1e-3)
    assert found.refresh_s == pytest.approx(0.3, abs=0.03)  # and the wait for the end of a decode step
    assert found.teaching == pytest.approx(0.7, abs=0.06)
    assert found.engines == 2
    assert set(found.workload.prompt_tokens.tolist()) == {200}


@pytest.mark.parametrize(
    ("lengths", "rules"),
    [
        pytest.param(LONG, dict(), id="long responses, half empty engines"),
        pytest.param(LONG, dict(work_in_progress=6.0, max_staleness=8), id="long responses, full engines"),
        pytest.param(SHORT, dict(), id="responses as short as the time between two observations"),
        pytest.param(SHORT, dict(work_in_progress=6.0, max_staleness=8), id="the same, full engines"),
        pytest.param(SHORT, dict(max_staleness=0, work_in_progress=1.0), id="the same, behind a barrier"),
    ],
)
def test_a_calibrated_simulation_predicts_the_run(lengths, rules, tmp_path):
    """Costs that a run cannot tell apart may come out wrong; what they add up to may not."""
    streaming = rules.get("max_staleness") != 0
    scenario = make_scenario(lengths, rules | dict(steps=40), longest=1000, streaming=streaming)
    scenario = replace(scenario, engine=replace(ENGINE, pause_s=0.01), refresh_s=0.03, reward_s=0.003)
    record(scenario, tmp_path)
    found = calibrate(tmp_path)
    again = simulate(calibrated(scenario, found))
    assert again.step_time_s == pytest.approx(found.measured.step_time_s, rel=0.07)
    assert again.train_wait_ratio == pytest.approx(found.measured.train_wait_ratio, rel=0.07, abs=0.07)


def test_progress_of_groups_is_that_of_each_response():
    """Against adding up response by response."""
    rng = np.random.default_rng(0)
    begin = np.sort(rng.uniform(0, 5, 12))
    lengths = rng.integers(1, 50, (12, 3)).astype(float)
    end, steps = begin + rng.uniform(0.5, 3, 12), lengths.max(axis=1)
    tokens, context = _progress(Lives(begin, end, lengths, 7.0, math.inf), steps)
    grid = np.linspace(0, 9, 900_001)
    made, held = np.zeros_like(grid), np.zeros_like(grid)
    for b, e, own, most in zip(begin, end, lengths, steps, strict=True):
        for length in own:
            done = np.clip((grid - b) * most / (e - b), 0, length)
            made += done
            held += np.where((done > 0) & (done < length), 7.0 + done, 0.0)
    for moment in (begin[2], end[0], begin[9], end.max()):
        place = round(moment * 100_000)
        assert tokens(moment) == pytest.approx(made[place], rel=1e-3)
        assert context(moment) == pytest.approx(np.trapezoid(held[: place + 1], grid[: place + 1]), rel=2e-3)


# ---- what it is made of


def test_a_calibration_is_the_same_after_a_file(tmp_path):
    record(make_scenario(SHORT, dict(steps=16)), tmp_path)
    found = calibrate(tmp_path)
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json").to_json() == found.to_json()
    assert found.run == tmp_path.name
    rows = pq.read_table(tmp_path / "ledger.parquet").sort_by("group_id").to_pylist()
    assert found.workload.lengths.tolist() == [row["lengths"] for row in rows]


def test_measured_is_what_the_trainer_saw(tmp_path):
    scenario = make_scenario(SHORT, dict(steps=40))
    result = record(scenario, tmp_path)
    measured = calibrate(tmp_path).measured
    assert measured.steps == 27  # of 40, without the first 10 and the last 3
    assert measured.step_time_s == pytest.approx(result.step_times[:27].mean(), abs=1e-4)
    assert measured.train_wait_ratio == pytest.approx(result.train_wait_ratio, abs=0.03)
    assert measured.tokens_per_s == pytest.approx(result.tokens_per_s, rel=0.05)


def test_kv_capacity_of_a_model_in_a_folder(tmp_path):
    config = dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert token_bytes(tmp_path, "bfloat16") == 2 * 3 * 2 * 8 * 2
    assert capacity("3K", token_bytes(tmp_path, "float32")) == 3 * 1024 // 384
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    assert token_bytes(tmp_path, "float32") == 2 * 3 * 2 * 16 * 4
    assert token_bytes(tmp_path / "nowhere", "float32") is None
    assert capacity("1G", None) == math.inf


# ---- bad input


def test_too_few_steps_are_refused(tmp_path):
    record(make_scenario(SHORT, dict(steps=11), warm_up=3), tmp_path)
    with pytest.raises(UserError, match="11 steps, too few"):
        calibrate(tmp_path)


def test_a_run_that_did_not_observe_its_engines_is_refused(tmp_path):
    record(make_scenario(SHORT, dict(steps=16)), tmp_path)
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for one in records:
        one.pop("active", None)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    with pytest.raises(UserError, match="0 observations of the engines"):
        calibrate(tmp_path)


def test_a_ledger_of_an_older_version_is_refused(tmp_path):
    record(make_scenario(SHORT, dict(steps=16)), tmp_path)
    table = pq.read_table(tmp_path / "ledger.parquet").drop_columns(["scored_t"])
    pq.write_table(table, tmp_path / "ledger.parquet")
    with pytest.raises(UserError, match="another version: it has no column scored_t"):
        calibrate(tmp_path)


def test_a_run_without_a_finished_group_is_refused(tmp_path):
    record(make_scenario(SHORT, dict(steps=16)), tmp_path)
    pq.write_table(pq.read_table(tmp_path / "ledger.parquet").slice(0, 0).cast(LEDGER), tmp_path / "ledger.parquet")
    with pytest.raises(UserError, match="no group of this run was finished"):
        calibrate(tmp_path)


def test_a_folder_without_settings_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        calibrate(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"run": "x"}', "[1]", "no json"])
def test_a_file_that_is_no_calibration_is_refused(content, tmp_path):
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(UserError, match="calibration"):
        Calibration.load(tmp_path / "calibration.json")


# ---- scenarios of profiles


def test_a_scenario_has_the_rules_and_all_prompts_of_its_profile():
    config = load_profile(PROFILES / "quickstart_cpu.yaml", ["data.train_prompts=200"])
    scenario = scenario_of(config)
    assert scenario.rules == rules_of(config)
    places = [place for group in scenario.order for minibatch in group for place in minibatch]
    assert sorted(places) == list(range(200))
    assert scenario.workload.lengths.max() <= config.generation.max_new_tokens
    assert scenario.streaming == config.streaming
    told = assumptions(config, None)
    assert any("decode step 8 ms" in line for line in told)
    assert any("median 25.6" in line for line in told)


@pytest.mark.parametrize("changes", [["mode=sync"], ["mode=fully_async", "control.max_staleness=0"]])
def test_behind_a_barrier_every_step_of_every_epoch_has_its_longest_prompts_first(tmp_path, changes):
    config = load_profile(PROFILES / "quickstart_cpu.yaml", [*changes, "data.train_prompts=200"])  # 12.5 batches
    scenario = scenario_of(config)
    simulate(scenario, tmp_path)
    table = pq.read_table(tmp_path / "ledger.parquet").sort_by("group_id")
    rows = np.array([int(name[1:]) for name in table["prompt_id"].to_pylist()])
    predicted = scenario.workload.predicted[rows[: 60 * 16]].reshape(60, 16)
    assert len(rows) >= 60 * 16
    assert (np.diff(predicted, axis=1) <= 0).all()


def test_a_scenario_draws_no_more_prompts_than_it_needs():
    config = load_profile(PROFILES / "synthetic_1m.yaml")
    scenario = scenario_of(config, steps=15)
    assert scenario.workload.lengths.shape == (4 * 15 * 64, 8)
    assert scenario_of(config, steps=15, prompts=700).workload.lengths.shape == (700, 8)
    assert (scenario.rules.steps, scenario.warm_up) == (15, 5)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_profile_of_few_steps_has_the_pace_of_one_that_goes_on(mode):
    """The first wave of groups is trained faster than it could be generated: it must not be all that is looked at."""
    changes = [f"mode={mode}", *(["control.work_in_progress=5"] if mode == "fully_async" else [])]
    few, many = (
        load_profile(PROFILES / "quickstart_cpu.yaml", [*changes, f"training.steps={steps}"]) for steps in (3, 150)
    )
    short, long = simulate(scenario_of(few)), simulate(scenario_of(many))
    assert short.over_bound >= 1
    assert short.step_time_s == pytest.approx(long.step_time_s, rel=0.1)
    assert [line for line in assumptions(few, None) if "the 3 of training.steps are too few" in line]
    assert not [line for line in assumptions(many, None) + assumptions(few, None, steps=90) if "too few" in line]


def test_the_bound_counts_no_pause_of_a_version_that_was_skipped():
    """More engines than the trainer needs wait for it: what binds is training, and a pause costs nobody anything."""
    changes = ["mode=fully_async", "generation.engines=4"]
    result = simulate(scenario_of(load_profile(PROFILES / "quickstart_cpu.yaml", changes)))
    assert result.bound.binding == "train"
    assert result.over_bound == pytest.approx(1, abs=0.005)


def test_the_window_begins_after_the_first_wave():
    """However many batches that is."""
    changes = ["control.work_in_progress=17", "control.max_staleness=20", "training.steps=3"]
    config = load_profile(PROFILES / "quickstart_cpu.yaml", changes)
    scenario = scenario_of(config)
    assert (scenario.warm_up, scenario.rules.steps) == (17, 51)
    with pytest.raises(UserError, match=r"^simulation: 50 steps are too few .*: simulate 51 or more$"):
        scenario_of(config, steps=50)


def test_a_calibrated_scenario_takes_costs_and_lengths_from_the_run(tmp_path):
    record(make_scenario(SHORT, dict(steps=16), longest=120), tmp_path)
    config, found = load_profile(PROFILES / "quickstart_cpu.yaml"), calibrate(tmp_path)
    scenario = scenario_of(config, found)
    assert (scenario.engine.a, scenario.engine.slots) == (found.engine.a, config.generation.max_num_seqs)
    assert scenario.workload is found.workload
    assert scenario.reward_s == found.reward_s + found.engine.latency_s
    assert assumptions(config, found) == ["the KV cache is never full (the size of a token in it is not known)"]
    with pytest.raises(UserError, match=r"groups of 8, the profile has generation.group_size 4"):
        scenario_of(load_profile(PROFILES / "quickstart_cpu.yaml", ["generation.group_size=4"]), found)


def test_profiles_that_cannot_be_simulated_are_refused():
    with pytest.raises(UserError, match=r"batch_groups \(64\) is more than data.train_prompts \(10\)"):
        scenario_of(load_profile(PROFILES / "synthetic_1m.yaml", ["data.train_prompts=10"]))
    with pytest.raises(UserError, match=r"prompt_tokens \(600\).*max_model_len \(8704\)"):
        load_profile(PROFILES / "synthetic_1m.yaml", ["lengths.assumed.prompt_tokens=600"])


def test_every_profile_has_a_scenario():
    for path in sorted(PROFILES.glob("*.yaml")):
        assert scenario_of(load_profile(path), steps=12).rules.steps == 12
    assert scenario_of(RunConfig(), steps=12).engines == 1


# ---- the command


def run_cli(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_simulate_plays_a_profile():
    answer = run_cli(PROFILES / "synthetic_1m.yaml", "--steps", 12, "--set", "generation.engines=2")
    assert answer.exit_code == 0, answer.output
    assert "speed of light" in answer.output
    assert "2 of 64 slots" in answer.output
    assert "measured" not in answer.output


def test_simulate_compares_with_the_run_it_is_calibrated_from(tmp_path):
    config = parse_config(yaml.safe_load((PROFILES / "quickstart_cpu.yaml").read_text()), where="quickstart")
    scenario = scenario_of(config, steps=40)
    # With a refresh that takes no time it is chance whether a group starts just before it or just after it.
    scenario = replace(scenario, engine=replace(scenario.engine, pause_s=0.01), refresh_s=0.03)
    scenario = replace(scenario, trainer=TrainerModel(0.1, 1e-5, 0.01))
    folder = tmp_path / "run"
    record(replace(scenario, workload=lognormal(1024, 8, SHORT, 128, 0)), folder)
    answer = run_cli(PROFILES / "quickstart_cpu.yaml", "--calibrate", folder, "--steps", 40)
    assert answer.exit_code == 0, answer.output
    rows = {line.split("│")[0].strip(): line.split("│")[1:] for line in answer.output.splitlines() if "│" in line}
    for name in ("step time", "trainer waits", "tokens"):
        assert abs(float(rows[name][2].strip().rstrip("%"))) < 15, answer.output
    assert Calibration.load(folder / "calibration.json").run == "run"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--calibrate", "nowhere"], "no such folder"),
        (["--set", "generation.max_num_seqs=0"], "generation.max_num_seqs"),
        (["--set", "data.train_prompts=3"], "data.train_prompts"),
        *((["--steps", steps], f"simulation: {steps} steps are too few for a steady pace") for steps in (-1, 0, 1, 11)),
    ],
)
def test_simulate_refuses_bad_input_in_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = run_cli(PROFILES / "synthetic_1m.yaml", *arguments)
    assert answer.exit_code == 2
    assert says in answer.output
    assert len(answer.output.strip().splitlines()) == 1
