"""What is demanded of a twin before it may be exchanged; the models here are plain modules, and nothing is packed."""

import pytest
import torch

from forebay.generation import twin


class Model(torch.nn.Module):
    """Loads as vLLM's models do: by name, silent about what it leaves out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2, bias=False)
        self.head = self.second
        self.register_buffer("scale", torch.ones(1))
        self.skipped, self.rows = (), None

    def load_weights(self, tensors):
        own = dict(self.named_parameters())
        for name, tensor in tensors:
            if name not in self.skipped:
                own[name].data[: self.rows] = tensor[: self.rows]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(twin, "process_weights_after_loading", lambda *_: None)
    return Model().requires_grad_(False)


def fresh():
    return [(name, torch.randn_like(weight)) for name, weight in Model().named_parameters()]


def test_a_twin_holds_the_new_weights_and_leaves_the_model_alone(model):
    before, tensors = {name: weight.clone() for name, weight in model.named_parameters()}, fresh()
    made = twin.make_twin(model, None, tensors)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert all(torch.equal(dict(made.named_parameters())[name], tensor) for name, tensor in tensors)
    assert made.head is made.second
    twin.exchange(model, made)
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in tensors)


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "second.weight"])
def test_a_weight_that_is_not_reached_is_refused(model, name):
    model.skipped = (name,)
    with pytest.raises(ValueError, match=f"left out .*{name}"):
        twin.make_twin(model, None, fresh())


def test_a_weight_that_is_reached_in_part_is_refused(model):
    model.rows = 2
    with pytest.raises(ValueError, match=r"left out .*first\.weight"):
        twin.make_twin(model, None, fresh())


def test_a_weight_that_loading_takes_away_is_refused(model, monkeypatch):
    monkeypatch.setattr(twin, "process_weights_after_loading", lambda made, *_: delattr(made.first, "bias"))
    with pytest.raises(ValueError, match="module first has other weights"):
        twin.make_twin(model, None, fresh())
