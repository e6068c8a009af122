"""The critic of PPO: a language model with a scalar head that learns what response tokens are worth.

Invariants:
- It has a backend of its own, of the policy's kind; the two share nothing but the micro-batches.
- A value is of the state before its token: the hidden state that the policy samples the token from.
- The loss is the mean over the tokens of the update, whatever `algorithm.aggregation` is.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forebay.errors import RunError
from forebay.training.algorithms.tokens import kept
from forebay.training.algorithms.values import value_loss
from forebay.training.backend import Backend
from forebay.training.distributed import Ranks
from forebay.training.logprobs import PolicyModel, response_states
from forebay.training.packing import MicroBatch, TrainSequence


class ValueHead(nn.Linear):
    """One number from a hidden state, in float32. Zero at first: nothing is known of any state yet."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[..., 0]


class ValueModel(nn.Module):
    """The trunk of a language model under a `ValueHead`."""

    def __init__(self, policy: PolicyModel, dtype: torch.dtype) -> None:
        """`policy` is used up: its language-model head is left out."""
        super().__init__()
        self.trunk: Any = policy.lm.base_model
        self.head = ValueHead(self.trunk.config.get_text_config().hidden_size, dtype)

    def forward(self, batch: MicroBatch) -> Tensor:
        """(R,) float32."""
        values: Tensor = self.head(response_states(self.trunk, batch))
        return values


class Critic:
    """All ranks construct and call it alike: `observe` a batch, then `backward` and `update` as often as the policy."""

    def __init__(self, backend: Backend, ranks: Ranks, clip: float) -> None:
        """`backend` holds a `ValueModel`."""
        self._backend, self._ranks, self._clip = backend, ranks, clip
        self.observe(())

    def values(self, micro: MicroBatch) -> Tensor:
        """(R,), without gradient."""
        values: Tensor = self._backend.evaluate(micro)
        return values

    def observe(self, sequences: Sequence[TrainSequence]) -> None:
        """A batch with the values and returns that its step is made of."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        self._tokens = 0
        self._metrics = explained(sequences)

    def backward(self, micro: MicroBatch) -> None:
        """Add the gradients of this rank's micro-batch."""
        mask = micro.weights > 0
        loss, clipped = value_loss(self._backend.forward(micro), micro.values, micro.returns, self._clip)
        total = kept(loss, mask).sum()
        self._backend.backward(total)
        self._sums += torch.stack([total.detach().double(), (clipped & mask).sum(dtype=torch.float64)])

    def update(self, step: int, tokens: int, learning_rate: float) -> dict[str, float]:
        """From the gradients of `tokens` tokens, of all ranks. Returns the metrics of the step so far:

        critic/value_loss, critic/clip_fraction (tokens that gave no gradient), critic/grad_norm, critic/learning_rate,
        and those of `explained`. Raises `RunError` for a loss or a gradient that is not finite.
        """
        self._tokens += tokens
        loss, clipped = self._ranks.sum(self._sums.to("cpu", copy=True)).tolist()
        norm = self._backend.step(float(tokens), learning_rate) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            raise RunError(f"step {step}: the critic's loss or gradient is not finite; lower critic.learning_rate")
        return self._metrics | {
            "critic/value_loss": loss / self._tokens,
            "critic/clip_fraction": clipped / self._tokens,
            "critic/grad_norm": norm,
            "critic/learning_rate": learning_rate,
        }

    def state(self) -> dict[str, Tensor]:
        """See `Backend.state`."""
        return self._backend.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See `Backend.load_state`."""
        self._backend.load_state(state)


def explained(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """critic/value_mean and critic/return_mean over tokens, before the step; critic/explained_variance =
    1 - var(returns - values) / var(returns): 1 if the critic knows all, 0 if it knows no more than the mean. The
    last one only if returns differ; nothing of no tokens."""
    if not sequences:
        return {}
    values, returns = (
        np.concatenate([np.asarray(getattr(s, name), dtype=np.float64) for s in sequences])
        for name in ("values", "returns")
    )
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if (variance := float(returns.var())) > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / variance
    return metrics
