"""The tiny twin of each profile for accelerators, through its whole path: data, lengths, schedule, training with real
engines and a real trainer, evaluation.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forebay.data.prepare import prepare_data
from forebay.evaluation.stage import evaluate
from forebay.lengths.stage import predict_lengths
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from forebay.telemetry.metrics import read_metrics
from forebay.train import train
from forebay.training.snapshots import verify_files
from tests.integration.test_modes import predict
from tests.support.twins import PROFILES, TWINS, twin

ELSEWHERE = {"maze_cpu", "quickstart_cpu", "telecom_cpu", "smollm2_cpu", "synthetic_1m"}
"""Profiles that run on a CPU as they are, or never."""


def test_every_profile_for_accelerators_has_a_twin() -> None:
    assert {path.stem for path in PROFILES.glob("*.yaml")} - ELSEWHERE == set(TWINS)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that each random model is made once."""
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize("name", list(TWINS))
def test_the_twin_runs_its_whole_path(name: str, scratch: Path) -> None:
    run = RunContext.create(twin(name, scratch))
    config = run.config
    prepare_data(run)
    if config.lengths.predictor == "length_lm":
        predict_lengths(run)
    else:
        predict(run)  # without an engine: tests/integration/test_lengths.py has the stage
    make_schedule(run)
    result = train(run, lambda record: None)
    assert result.steps == config.training.steps
    assert (result.engine_restarts, result.trainer_restarts) == (0, 0)
    assert result.refreshes >= 1
    assert result.fates["trained"] + result.fates["filtered"] >= config.training.steps * config.control.batch_groups
    assert result.staleness.max <= result.staleness_bound

    steps = read_metrics(run.metrics).steps
    assert all(step["grad_norm"] > 0 for step in steps)
    # The first step of a version has the weights that the engine has; later ones have moved.
    first = [step for step in steps if (step["step"] - 1) % config.control.sync_every == 0]
    compared = [step["mismatch/mean_abs"] for step in first if "mismatch/mean_abs" in step]
    assert compared
    assert max(compared) < config.algorithm.mismatch_alarm

    manifest = verify_files(run.trained_model)
    before, after = (weights(folder) for folder in (run.start_model, run.trained_model))
    assert before.keys() == after.keys() == manifest["tensors"].keys()
    moved = [name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])]
    assert len(moved) > len(before) / 2

    evaluation = evaluate(run)
    assert (evaluation.n, evaluation.left_out) == (4, 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
