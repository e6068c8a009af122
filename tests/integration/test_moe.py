"""A mixture of experts through everything that a run has: real engine, real trainer, the real Control Unit."""

import pytest
from safetensors.torch import load_file

from forebay.config import parse_config
from forebay.data.prepare import prepare_data
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from tests.integration.test_modes import Trained, predict, train
from tests.support.reference_model import ReferenceModel

STEPS, BATCH, GROUP = 4, 4, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    values = {
        "mode": "sync",
        "model": {"path": "builtin:random-qwen3_moe", "max_model_len": 128},
        "data": {"source": "builtin:arithmetic", "train_prompts": 32, "validation_prompts": 8, "test_prompts": 8},
        "reward": {"name": "tests.support.rewards:letters", "truncated": "score"},
        "schedule": {"minibatch_prompts": 2},
        "generation": {"group_size": GROUP, "max_new_tokens": 24, "kv_cache": "64M"},
        "control": {"batch_groups": BATCH},
        "algorithm": {"router_aux_loss": 0.01},
        "training": {"steps": STEPS, "learning_rate": 5e-3, "warmup_steps": 0, "zero_stage": 3},
        "storage": {"scratch": str(tmp_path_factory.mktemp("moe"))},
    }
    run = RunContext.create(parse_config(values, "test"))
    prepare_data(run)
    predict(run)
    make_schedule(run)
    return run


def test_a_run_on_experts_and_its_model(run: RunContext) -> None:
    """Every version's samples have the trainer's log-probabilities; the end is a plain model."""
    metrics: list[dict[str, float]] = []
    trained: Trained = train(run, metrics.append)
    assert trained.result.fates["trained"] == STEPS * BATCH
    assert trained.result.refreshes == STEPS - 1
    assert all(record["mismatch/max_abs"] < 1e-3 for record in metrics)
    last, start = max(trained.groups), ReferenceModel(run.start_model)
    group = trained.groups[last]
    old = start.logprobs(group.prompt.ids, group.samples[0].ids)
    gaps = [abs(a - b) for a, b in zip(old, group.samples[0].logprobs, strict=True)]
    assert max(gaps) > 0.05  # an engine that had missed a version would show
    weights = [load_file(folder / "model.safetensors") for folder in (run.start_model, run.trained_model)]
    assert weights[0].keys() == weights[1].keys()
    assert any(".experts.7.down_proj" in name for name in weights[1])
    assert ReferenceModel(run.trained_model).logprobs([5, 6], [7]) != start.logprobs([5, 6], [7])
