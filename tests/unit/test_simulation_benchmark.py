"""The benchmark's own arithmetic, on a run that was simulated."""

from dataclasses import replace

import pytest
import yaml

from benchmarks.simulation import compare, large_scenario, measure_speed, outcome
from forebay.config import parse_config
from forebay.simulation.model import TrainerModel
from forebay.simulation.run import simulate
from forebay.simulation.scenario import scenario_of


def test_a_run_is_compared_with_its_simulation(tmp_path):
    settings = {"training": {"steps": 30}, "generation": {"max_num_seqs": 64}}
    config = parse_config(settings, where="test")
    scenario = scenario_of(config)
    quick = replace(scenario, engine=replace(scenario.engine, pause_s=0.01), trainer=TrainerModel(0.1, 1e-5))
    simulate(quick, tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    rows = compare(config, tmp_path)
    assert [row["what"] for row in rows] == ["step_time_s", "train_wait_s", "tokens_per_s"]
    assert all(row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1) for row in rows)
    assert outcome(rows)["step_time_error"] < 0.15


def test_the_largest_error_counts():
    rows = [
        {"what": "step_time_s", "error": 0.02},
        {"what": "train_wait_s", "error": 0.01},
        {"what": "step_time_s", "error": -0.07},
        {"what": "train_wait_s", "error": 0.11},
    ]
    assert outcome(rows) == {"step_time_error": 0.07, "train_wait_error": 0.11}


def test_the_large_scenario_fills_its_slots():
    scenario = large_scenario(engines=2, slots=64, steps=12)
    assert scenario.rules.batch_groups * scenario.rules.group_size == 2 * 64
    speed = measure_speed(scenario)
    assert 0.9 < speed["large_over_bound"] < 1.2
    assert speed["large_us_per_response"] > 0
