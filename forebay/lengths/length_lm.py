"""`length_lm`: a causal LM of the target's family with one linear output on its last hidden state, fine-tuned on log
length (how ASP was published, there with Qwen2.5-1.5B)."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.lengths.encoder import batches, fitting_threads, last_states, load_encoder, states
from forebay.lengths.prompts import Prompts, Vector
from forebay.lengths.ridge import fit_ridge

BATCH = 32
EPOCHS, PATIENCE = 20, 5
"""At most so many passes over the prompts; so many without a better validation error end it."""
VALIDATION = 0.2
"""Share of the prompts that stop the training."""
WARM_UP = 20
"""Steps of linear warm-up; linear decay follows."""
HEAD_STEP = 0.1
"""Most that one step of the new output's weights changes an output, in standard deviations of the target, where the
hidden state's entries are about 1: Adam moves each weight by the learning rate."""


@dataclass(frozen=True)
class LengthLm:
    """Fitted by `fit_length_lm`; a `Location`."""

    encoder: Any
    head: Any
    mean: float
    scale: float

    def predict(self, prompts: Prompts) -> Vector:
        """Mean log length of each prompt's responses."""
        import torch

        result = np.empty(len(prompts))
        with fitting_threads(self.encoder), torch.inference_mode():
            for index in batches(prompts, 256):
                values = _outputs(self.encoder, self.head, prompts, index)
                result[index] = self.mean + self.scale * values.double().cpu().numpy()
        return result


def fit_length_lm(prompts: Prompts, target: Vector, model: str, setting: str, seed: int) -> LengthLm:
    """`target`: mean log length of each prompt's responses; `model`: a folder or hub name, of which `setting` speaks.

    First the output alone, by ridge regression (a linear probe: what is fine-tuned from there forgets less; Kumar et
    al., 2022), then everything by AdamW on squared error of the standardised target. The weights with the least error
    on `VALIDATION` of the prompts are kept, those of the probe among them.
    """
    import torch

    encoder = load_encoder(model, "float32", prompts, setting)
    head = torch.nn.Linear(encoder.config.get_text_config().hidden_size, 1).to(encoder.device)
    mean, scale = float(target.mean()), max(float(target.std()), 1e-6)
    fitted = LengthLm(encoder, head, mean, scale)
    held_out = max(1, round(VALIDATION * len(target)))
    order = np.random.default_rng(seed).permutation(len(target))
    training, validation = order[held_out:], order[:held_out]
    with fitting_threads(encoder):
        _probe(fitted, prompts.take(training), target[training])
        if np.ptp(target) > 1e-9:
            _train(fitted, prompts, target, training, validation, seed)
    encoder.eval()
    return fitted


def learning_rate(parameters: int) -> float:
    """Small models bear larger steps: 1e-3 at 250 thousand parameters, 4e-5 at 135 million, 1.3e-5 at 1.5 billion."""
    return float(np.clip(0.5 / math.sqrt(parameters), 1e-5, 1e-3))


def _probe(fitted: LengthLm, prompts: Prompts, target: Vector) -> None:
    """Give the output the weights of a ridge regression on the last hidden state."""
    import torch

    rows = np.empty((len(prompts), fitted.head.in_features))
    with torch.inference_mode():
        for index in batches(prompts, 256):
            rows[index] = last_states(*states(fitted.encoder, prompts, index)).double().cpu().numpy()
    ridge = fit_ridge(rows, (target - fitted.mean) / fitted.scale)
    weights = ridge.weights / ridge.scale
    with torch.no_grad():
        fitted.head.weight.copy_(torch.from_numpy(weights)[None])
        fitted.head.bias.fill_(float(ridge.intercept - ridge.mean @ weights))


def _train(fitted: LengthLm, prompts: Prompts, target: Vector, training: Any, validation: Any, seed: int) -> None:
    """Leaves the best weights in `fitted`."""
    import torch

    encoder, head = fitted.encoder, fitted.head
    rate = learning_rate(sum(p.numel() for p in encoder.parameters()))
    groups = [
        {"params": list(encoder.parameters()), "rate": rate},
        {"params": list(head.parameters()), "rate": HEAD_STEP / head.in_features},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    seen = prompts.take(validation)
    best, kept, waited, step = math.inf, _weights(fitted), 0, 0
    steps = EPOCHS * math.ceil(len(training) / BATCH)
    for _ in range(EPOCHS + 1):
        error = float(np.mean((fitted.predict(seen) - target[validation]) ** 2))
        if error < best:
            best, kept, waited = error, _weights(fitted), 0
        elif (waited := waited + 1) >= PATIENCE:
            break
        encoder.train()
        shuffled = rng.permutation(training)
        for start in range(0, len(shuffled), BATCH):
            index, step = shuffled[start : start + BATCH], step + 1
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * min(1.0, step / WARM_UP, max(0.1, 1 - step / steps))
            wanted = torch.from_numpy((target[index] - fitted.mean) / fitted.scale).float().to(encoder.device)
            loss = torch.nn.functional.mse_loss(_outputs(encoder, head, prompts, index), wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 1.0)
            optimizer.step()
        encoder.eval()
    encoder.load_state_dict(kept[0])
    head.load_state_dict(kept[1])


def _outputs(encoder: Any, head: Any, prompts: Prompts, index: Any) -> Any:
    """[rows], standardised log lengths."""
    return head(last_states(*states(encoder, prompts, index)))[:, 0]


def _weights(fitted: LengthLm) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(fitted.encoder.state_dict()), copy.deepcopy(fitted.head.state_dict())
