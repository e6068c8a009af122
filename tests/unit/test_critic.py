"""The critic's values and gradients against transformers' plain forward and the loss written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay.errors import RunError
from forebay.training.critic import Critic, ValueModel, explained
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import MicroBatch, TrainSequence, pack
from tests.support.tiny_lm import make_start_model

CLIP = 0.2
CPU = torch.device("cpu")


class Alone:
    rank, world, device = 0, 1, CPU

    @staticmethod
    def sum(values: torch.Tensor) -> torch.Tensor:
        return values


class PlainBackend:
    def __init__(self, module: ValueModel) -> None:
        self.module, self.steps = module, list[tuple[float, float]]()

    def forward(self, batch: MicroBatch) -> Any:
        return self.module(batch)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, divisor: float, learning_rate: float) -> float:
        self.steps.append((divisor, learning_rate))
        return float(torch.stack([p.grad.norm() for p in self.module.parameters() if p.grad is not None]).norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start_model(tmp_path_factory.mktemp("model"))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def model(folder: Path) -> ValueModel:
    module = ValueModel(PolicyModel(load(folder), 0.8), torch.float32)
    with torch.no_grad():
        module.head.weight.copy_(torch.linspace(-0.3, 0.4, module.head.weight.numel())[None])
        module.head.bias.fill_(0.1)
    return module


def sequences(seed: int = 0) -> list[TrainSequence]:
    rng, found = np.random.default_rng(seed), []
    for length in (5, 1, 9):
        prompt, ids = rng.integers(2, 100, 3).tolist(), rng.integers(2, 100, length).tolist()
        values, returns = rng.normal(size=(2, length)).astype(np.float32)
        found.append(TrainSequence(prompt, ids, [0.0] * length, 0.0, True, values=values, returns=returns))
    return found


def plain_values(folder: Path, model: ValueModel, sequence: TrainSequence) -> torch.Tensor:
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.ids]])
    states = load(folder).base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    at = len(sequence.prompt_ids) - 1
    return states[at : at + len(sequence.ids)] @ model.head.weight.detach()[0] + model.head.bias.detach()


def test_values_are_of_the_state_before_each_token(folder: Path, model: ValueModel) -> None:
    batch = sequences()
    expected = torch.cat([plain_values(folder, model, sequence) for sequence in batch])
    torch.testing.assert_close(model(pack(batch)), expected, rtol=1e-5, atol=1e-5)


def test_a_new_critic_knows_nothing_and_has_no_language_model_head(folder: Path) -> None:
    module = ValueModel(PolicyModel(load(folder), 0.8), torch.float32)
    assert torch.equal(module(pack(sequences())), torch.zeros(15))
    assert sorted({name.split(".")[0] for name, _ in module.named_parameters()}) == ["head", "trunk"]


def test_loss_gradients_and_metrics_equal_the_formula(model: ValueModel) -> None:
    batch = sequences()
    backend = PlainBackend(model)
    critic = Critic(backend, Alone(), CLIP)  # type: ignore[arg-type]
    critic.observe(batch)
    for part in (batch[:1], batch[1:], []):  # the last one is padding
        critic.backward(pack(part))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    metrics = critic.update(3, 15, 0.01)
    assert backend.steps == [(15.0, 0.01)]

    model.zero_grad()
    values = model(pack(batch))
    old, target = (torch.from_numpy(np.concatenate([getattr(s, n) for s in batch])) for n in ("values", "returns"))
    near = old + (values - old).clamp(-CLIP, CLIP)
    free, held = (values - target) ** 2, (near - target) ** 2
    (0.5 * torch.maximum(free, held)).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert metrics["critic/value_loss"] == pytest.approx(
        float(0.5 * torch.maximum(free, held).mean().detach()), rel=1e-5
    )
    assert metrics["critic/clip_fraction"] == pytest.approx(float((held > free).float().mean()))
    assert 0 < metrics["critic/clip_fraction"] < 1
    assert metrics["critic/learning_rate"] == 0.01
    assert metrics["critic/explained_variance"] == pytest.approx(
        1 - float((target - old).var() / target.var()), rel=1e-5
    )


def test_what_is_known_of_nothing_and_of_equal_returns() -> None:
    assert explained([]) == {}
    alike = [TrainSequence([1], [2, 3], [0.0] * 2, 0.0, True, values=np.zeros(2), returns=np.ones(2))]
    assert explained(alike) == {"critic/value_mean": 0.0, "critic/return_mean": 1.0}


def test_a_loss_that_is_not_finite_updates_nothing(model: ValueModel) -> None:
    backend = PlainBackend(model)
    critic = Critic(backend, Alone(), CLIP)  # type: ignore[arg-type]
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    critic.backward(pack(sequences()))
    with pytest.raises(RunError, match=r"step 3: the critic's loss or gradient is not finite; lower critic\.learning"):
        critic.update(3, 15, 0.01)
    assert backend.steps == []
