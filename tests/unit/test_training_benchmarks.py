"""What the benchmarks of the training step count and compare, without running them."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import logprob_memory, training_step
from benchmarks.training_step_sides import _padded
from forebay.errors import RunError
from tests.support.tiny_lm import make_start_model

GROUPS = [([2, 3, 4], [[5, 6], [7, 8, 9, 10]]), ([11], [[12], [13, 14, 15]])]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> training_step.Task:
    folder = make_start_model(tmp_path_factory.mktemp("lm"))
    args = argparse.Namespace(threads=1, steps=2, dtype="float32")
    return training_step.prepared(folder, GROUPS, args, recompute=False, packed_tokens=64, padded_rows=2)


def test_needed_flops_are_those_that_torch_counts(task: training_step.Task) -> None:
    """Per sequence; torch counts attention in full, five products of scores in all, and the head at every token."""
    lm = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="eager")
    prompt, response = 12, 20
    with FlopCounterMode(display=False) as counted:
        hidden = lm.base_model(torch.arange(2, 2 + prompt + response)[None]).last_hidden_state
        lm.lm_head(hidden[:, prompt - 1 : -1]).sum().backward()
    # Causal attention needs half of what the mask leaves to be computed.
    attention = 2 * 3 * 2 * 2 * 32 * (prompt + response) ** 2
    expected = counted.get_total_flops() - attention / 2
    assert training_step.needed_flops(lm, [(prompt, response)]) == pytest.approx(expected)


def test_both_sides_get_the_same_advantages_and_old_logprobs(task: training_step.Task) -> None:
    batch = _padded(task)
    assert batch["prompt_ids"].tolist() == [[2, 3, 4], [2, 3, 4], [0, 0, 11], [0, 0, 11]]
    assert batch["completion_ids"].tolist() == [[5, 6, 0, 0], [7, 8, 9, 10], [12, 0, 0, 0], [13, 14, 15, 0]]
    assert batch["completion_mask"].sum() == batch["num_items_in_batch"] == 10
    rewards = torch.tensor([[s["reward"] for s in group["samples"]] for group in task.groups])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    assert torch.allclose(batch["advantages"], expected.flatten())
    for row, sample in zip(batch["old_per_token_logps"], task.samples, strict=True):
        assert row.tolist()[: len(sample["ids"])] == pytest.approx(sample["logprobs"])


def test_rates_leave_out_the_first_step(task: training_step.Task) -> None:
    def steps(*seconds: float) -> list[dict[str, float]]:
        return [{"wall_s": 2 * s, "cpu_s": s} for s in seconds]

    taken = {"ours": steps(9.0, 1.0, 1.0, 2.0), "trl": steps(9.0, 3.0, 4.0, 3.0)}
    result = training_step.compare(task, taken, peak=1e9)
    assert (task.tokens, result["padded_tokens"]) == (18, 4 * (3 + 4))
    assert result["ours_tokens_per_s"] == 18 / 2.0
    assert result["tokens_per_s_over_trl"] == result["tokens_per_cpu_s_over_trl"] == pytest.approx(3.0)
    assert result["ours_flop_utilisation"] == pytest.approx(task.flops / 1e9)


def test_sides_that_train_different_things_are_refused() -> None:
    same: dict[str, Any] = {"loss": -0.1, "grad_norm": 5.0}
    training_step.agree("float32", same, same | {"loss": -0.1001, "grad_norm": 5.005})
    with pytest.raises(RunError, match=re.escape("loss -0.1 and -0.12")):
        training_step.agree("float32", same, same | {"loss": -0.12})
    with pytest.raises(RunError, match=re.escape("grad_norm 5 and 5.1")):
        training_step.agree("float32", same, same | {"grad_norm": 5.1})


def test_memory_is_measured_as_documented() -> None:
    """A chunk that needs the weight's gradient and little else."""
    (naive, ours), result = logprob_memory.compare(256, 20000, 64, dtype="float32", threads=1)
    gradient, logits = 4e-9 * 20000 * 64, 4e-9 * 20000 * 256
    assert gradient < ours["peak_gb"] < gradient + 0.02
    assert 2 * logits < naive["peak_gb"] < 3 * logits + gradient + 0.02
    assert result["logprob_memory_over_naive"] == ours["peak_gb"] / naive["peak_gb"]


def test_available_memory_is_read_from_the_system() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < logprob_memory.available() <= 1024 * int(total.split()[1])
