"""One optimizer step from one batch, whole or in chunks, on any backend.

Invariants:
- The loss is a mean over the response tokens of the whole batch, so the split over ranks, chunks and micro-batches does
  not change the update.
- Every rank runs the same number of forward and backward passes.
- Nothing is updated from a loss that is not finite.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forebay.config import RunConfig
from forebay.errors import RunError
from forebay.training.backend import Backend, full_shards
from forebay.training.batches import Chunk, Totals
from forebay.training.distributed import Ranks
from forebay.training.losses import clipped_policy_loss, clipped_tokens, divergence
from forebay.training.packing import MicroBatch, pack, plan_micro_batches
from forebay.training.schedules import learning_rate


class Learner:
    """All ranks construct and call it alike."""

    def __init__(self, config: RunConfig, ranks: Ranks, lm: PreTrainedModel, backend: Backend) -> None:
        """`backend` holds a `PolicyModel` of `lm`."""
        self._config, self._ranks, self._lm, self._backend = config.training, ranks, lm, backend
        self._dtype = getattr(torch, config.model.dtype)
        self._peak_rate = peak_rate(config)
        self._updates = 0
        self._totals, self._meter = Totals(), _Meter(ranks.device)

    def accumulate(self, chunk: Chunk) -> None:
        """Add the gradients of these groups to the step's. Nothing is divided yet: how many tokens the batch has is
        known when its last chunk is here."""
        self._totals += chunk.totals
        c = self._config
        plan = plan_micro_batches([len(s) for s in chunk.sequences], self._ranks.world, c.micro_batch_tokens, c.balance)
        for indices in plan[self._ranks.rank]:
            self._backward(pack([chunk.sequences[i] for i in indices]).to(self._ranks.device))

    def update(self, step: int) -> dict[str, float]:
        """One update from what has been accumulated; returns the metrics of the whole batch. An empty batch changes
        nothing."""
        totals, meter = self._totals, self._meter
        self._totals, self._meter = Totals(), _Meter(self._ranks.device)
        metrics = totals.metrics()
        if not totals.tokens:
            return metrics
        metrics |= meter.result(self._ranks, totals.tokens)
        if not math.isfinite(metrics["loss"]):
            raise RunError(f"step {step}: the loss is {metrics['loss']}; lower training.learning_rate")
        metrics["learning_rate"] = self._learning_rate()
        metrics["grad_norm"] = self._backend.step(totals.tokens, metrics["learning_rate"])
        self._updates += 1
        if not math.isfinite(metrics["grad_norm"]):
            raise RunError(f"step {step}: the gradient is not finite; lower training.learning_rate")
        return metrics

    def state(self) -> dict[str, Tensor]:
        """What this rank needs to go on from here: a copy on the CPU. Gradients accumulated so far are no part."""
        state = self._backend.state() | {"updates": torch.tensor(self._updates), "rng": torch.get_rng_state()}
        if self._ranks.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self._ranks.device)
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there. All ranks together."""
        self._backend.load_state(state)
        self._updates = int(state["updates"])
        torch.set_rng_state(state["rng"])
        if self._ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng.cuda"], self._ranks.device)

    def shards(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The full weights by hub name, in `model.dtype`, on the CPU, about 2 GiB at a time.

        Every rank must exhaust it (gathering is collective); ranks other than 0 get empty lists.
        """
        return full_shards(self._lm, self._backend, self._dtype, self._ranks.rank)

    def _backward(self, micro: MicroBatch) -> None:
        c = self._config
        logprobs, entropy = self._backend.forward(micro)
        token_loss, ratio = clipped_policy_loss(logprobs, micro.behaviour, micro.advantages, c.clip_low, c.clip_high)
        loss = (token_loss * micro.weights).sum()
        self._backend.backward(loss)
        with torch.no_grad():
            clipped = clipped_tokens(ratio, micro.advantages, c.clip_low, c.clip_high)
            self._meter.add(micro, loss, logprobs, ratio, entropy, clipped)

    def _learning_rate(self) -> float:
        c = self._config
        return learning_rate(
            self._updates,
            peak=self._peak_rate,
            warmup=c.warmup_steps,
            total=c.steps,
            schedule=c.learning_rate_schedule,
            min_ratio=c.min_learning_rate_ratio,
        )


def peak_rate(config: RunConfig) -> float:
    """The learning rate after warm-up."""
    shared = config.control.sync_every if config.control.learning_rate_scaling == "inverse_interval" else 1
    return config.training.learning_rate / shared


class _Meter:
    """Sums and maxima over the micro-batches of a step, kept on the device until the end."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(2, dtype=torch.float64, device=device)

    def add(
        self, micro: MicroBatch, loss: Tensor, logprobs: Tensor, ratio: Tensor, entropy: Tensor, clipped: Tensor
    ) -> None:
        weights, current = micro.weights, micro.current
        mismatch = divergence(logprobs, micro.behaviour) * current
        sums = (loss, (clipped * weights).sum(), (entropy * weights).sum(), mismatch.sum(), current.sum())
        gap = (logprobs - micro.behaviour).abs() * current
        self._sums += torch.stack([s.double() for s in sums])
        self._maxima = torch.maximum(self._maxima, torch.stack([(ratio * weights).max(), gap.max()]).double())

    def result(self, ranks: Ranks, tokens: int) -> dict[str, float]:
        loss, clipped, entropy, mismatch, current = ranks.sum(self._sums.cpu()).tolist()
        ratio_max, gap_max = ranks.max(self._maxima.cpu()).tolist()
        metrics = {
            "loss": loss / tokens,
            "clip_fraction": clipped / tokens,
            "entropy": entropy / tokens,
            "ratio_max": ratio_max,
        }
        if current:
            metrics |= {"mismatch/kl_mean": mismatch / current, "mismatch/max_abs": gap_max}
        return metrics
