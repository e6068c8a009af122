"""One optimizer step from one batch, whole or in chunks, on any backend.

Invariants:
- The loss is divided once by what the whole batch adds up to (`algorithms.aggregation`), so the split over ranks,
  chunks and micro-batches does not change the update.
- Every rank runs the same number of forward and backward passes.
- Nothing is updated from a loss that is not finite.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forebay.config import RunConfig
from forebay.errors import RunError
from forebay.training.algorithms.aggregation import divisor, token_weights, weighted_sum
from forebay.training.algorithms.kl import reward_penalty
from forebay.training.algorithms.mismatch import alarm
from forebay.training.algorithms.token_loss import TokenInputs, token_loss
from forebay.training.algorithms.tokens import sequence_sum
from forebay.training.backend import Backend, full_shards
from forebay.training.batches import Chunk, Totals
from forebay.training.distributed import Ranks
from forebay.training.meter import Meter
from forebay.training.packing import MicroBatch, TrainSequence, pack, plan_micro_batches
from forebay.training.reference import Reference
from forebay.training.schedules import learning_rate


class Learner:
    """All ranks construct and call it alike."""

    def __init__(
        self, config: RunConfig, ranks: Ranks, lm: PreTrainedModel, backend: Backend, reference: Reference | None = None
    ) -> None:
        """`backend` holds a `PolicyModel` of `lm`; `reference` is there if the algorithm has a KL term."""
        self._config, self._ranks, self._lm, self._backend = config.training, ranks, lm, backend
        self._algorithm, self._reference = config.algorithm, reference
        self._fixed_length = config.algorithm.fixed_length or config.generation.max_new_tokens
        self._dtype = getattr(torch, config.model.dtype)
        self._peak_rate = peak_rate(config)
        self._updates = 0
        self._begin()

    def _begin(self) -> None:
        """Of the next step nothing is there yet."""
        self._totals, self._meter, self._divisor = Totals(), Meter(self._ranks.device), 0.0

    def accumulate(self, chunk: Chunk) -> None:
        """Add the gradients of these groups to the step's. Nothing is divided yet: how many tokens the batch has is
        known when its last chunk is here."""
        self._totals += chunk.totals
        lengths = [len(sequence.ids) for sequence in chunk.sequences]
        self._divisor += divisor(self._algorithm.aggregation, lengths, self._fixed_length)
        penalties = self._penalties(chunk) if self._algorithm.kl == "reward" else None
        for micro, _ in self._micro_batches(chunk.taught(self._algorithm, penalties)):
            self._backward(micro)

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[MicroBatch, list[int]]]:
        """This rank's, each with the indices of its sequences; none for a padding micro-batch."""
        c = self._config
        plan = plan_micro_batches([len(s) for s in sequences], self._ranks.world, c.micro_batch_tokens, c.balance)
        for indices in plan[self._ranks.rank]:
            yield pack([sequences[i] for i in indices]).to(self._ranks.device), indices

    def _penalties(self, chunk: Chunk) -> list[float]:
        """For each sequence what its distance from the reference takes off its reward."""
        penalties = torch.zeros(len(chunk.sequences), dtype=torch.float64)
        for micro, indices in self._micro_batches(chunk.sequences):
            logprobs, _ = self._backend.evaluate(micro)
            mask = micro.weights > 0
            tokens = reward_penalty(logprobs, self._distant(micro), mask, self._algorithm.kl_coefficient)
            if indices:
                first = torch.searchsorted(micro.sequence, torch.arange(len(indices), device=tokens.device))
                penalties[indices] = sequence_sum(tokens, micro.sequence, mask)[first].cpu()
        whole: list[float] = self._ranks.sum(penalties).tolist()
        return whole

    def _distant(self, micro: MicroBatch) -> Tensor:
        assert self._reference is not None, "an algorithm with KL has a reference"
        return self._reference.logprobs(micro)

    def update(self, step: int) -> dict[str, float]:
        """One update from what has been accumulated; returns the metrics of the whole batch. An empty batch changes
        nothing."""
        totals, meter, whole = self._totals, self._meter, self._divisor
        self._begin()
        if self._reference is not None:
            self._reference.rest()
        metrics = totals.metrics()
        if not totals.tokens:
            return metrics
        metrics |= meter.result(self._ranks, totals.tokens, whole)
        if not math.isfinite(metrics["loss"]):
            raise RunError(f"step {step}: the loss is {metrics['loss']}; lower training.learning_rate")
        warning = alarm(metrics, self._algorithm.mismatch_alarm)
        metrics["mismatch/alarm"] = float(warning is not None)
        if warning and self._ranks.rank == 0:
            print(f"trainer: step {step}: {warning}", file=sys.stderr, flush=True)
        metrics["learning_rate"] = self._learning_rate()
        metrics["grad_norm"] = self._backend.step(whole, metrics["learning_rate"])
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
        reference = self._distant(micro) if self._algorithm.kl == "loss" else None
        logprobs, entropy = self._backend.forward(micro)
        mask = micro.weights > 0
        inputs = TokenInputs(micro.behaviour, micro.advantages, micro.sequence, mask, reference=reference)
        token = token_loss(logprobs, inputs, self._algorithm)
        loss = weighted_sum(token.loss, token_weights(self._algorithm.aggregation, micro.sequence, mask))
        self._backend.backward(loss)
        self._meter.add(micro, loss.detach(), logprobs.detach(), entropy.detach(), token)

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
