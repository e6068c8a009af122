"""One step from one batch, whole or in chunks, on any backend; one update, or several with parts of the batch.

Invariants:
- The loss is divided once by what the whole update adds up to (`algorithms.aggregation`), so the split over ranks,
  chunks and micro-batches does not change the update.
- What an update is made of (advantages, log-probabilities of before the step, returns) is known on every rank for all
  of the batch before its first gradient.
- Every rank runs the same number of forward and backward passes.
- Nothing is updated from a loss that is not finite.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forebay.config import RunConfig
from forebay.errors import RunError
from forebay.training.algorithms.aggregation import divisor, token_weights, weighted_sum
from forebay.training.algorithms.kl import reward_penalty
from forebay.training.algorithms.mismatch import alarm
from forebay.training.algorithms.token_loss import TokenInputs, token_loss, with_router_loss
from forebay.training.backend import Backend, adapter_shard, full_shards
from forebay.training.batches import Before, Chunk, Totals
from forebay.training.critic import Critic
from forebay.training.distributed import Ranks
from forebay.training.meter import Meter
from forebay.training.packing import MicroBatch, TrainSequence, pack, plan_micro_batches
from forebay.training.reference import BaseReference, Reference
from forebay.training.schedules import learning_rate
from forebay.training.vision import Pictures

CRITIC = "critic."
"""In a checkpoint: before the names of the critic's tensors."""


class Learner:
    """All ranks construct and call it alike."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        lm: PreTrainedModel,
        backend: Backend,
        reference: Reference | BaseReference | None = None,
        critic: Critic | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """`backend` holds a `PolicyModel` of `lm`; `reference` is there if the algorithm has a KL term, `critic` if its
        advantages need one, `pictures` if the model has a vision tower."""
        self._config, self._ranks, self._lm, self._backend = config.training, ranks, lm, backend
        self._algorithm, self._reference, self._critic = config.algorithm, reference, critic
        self._pictures = pictures
        self._fixed_length = config.algorithm.fixed_length or config.generation.max_new_tokens
        self._dtype = getattr(torch, config.model.dtype)
        self._seed, self._peak_rate, self._critic_rate = config.seed, peak_rate(config), config.critic.learning_rate
        self._several = config.training.updates_per_batch * config.training.mini_batches > 1
        self._alone = config.critic.warmup_steps if critic else 0
        self._updates = 0
        """Steps that updated anything."""
        self._begin()

    def _begin(self) -> None:
        """Of the next step nothing is there yet."""
        self._totals, self._meter = Totals(), Meter(self._ranks.device)
        self._held: list[TrainSequence] = []
        self._tokens, self._divisor = 0, 0.0

    def accumulate(self, chunk: Chunk) -> None:
        """Take in these groups. If the step is one update, their gradients are added to it: nothing is divided yet; how
        many tokens the batch has is known when its last chunk is here."""
        self._totals += chunk.totals
        taught = chunk.taught(self._algorithm, self._before(chunk))
        if self._critic and taught:
            self._critic.observe(taught)
        if self._several:
            self._held += taught
        else:
            self._add(taught)

    def _add(self, sequences: Sequence[TrainSequence]) -> None:
        """Add their gradients to the next update's."""
        lengths = [len(sequence.ids) for sequence in sequences]
        self._divisor += divisor(self._algorithm.aggregation, lengths, self._fixed_length)
        self._tokens += sum(lengths)
        for micro, _ in self._micro_batches(sequences):
            if self._updates >= self._alone:
                self._backward(micro)
            if self._critic:
                self._critic.backward(micro)

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[MicroBatch, list[int]]]:
        """This rank's, each with the indices of its sequences; none for a padding micro-batch."""
        c = self._config
        plan = plan_micro_batches([len(s) for s in sequences], self._ranks.world, c.micro_batch_tokens, c.balance)
        for indices in plan[self._ranks.rank]:
            yield pack([sequences[i] for i in indices], self._pictures).to(self._ranks.device), indices

    def _before(self, chunk: Chunk) -> Before | None:
        """None if the algorithm asks for nothing."""
        if not (self._several or self._critic or self._algorithm.kl == "reward"):
            return None
        starts = np.cumsum([0, *(len(sequence.ids) for sequence in chunk.sequences)])
        found = torch.zeros(3, int(starts[-1]))
        for micro, indices in self._micro_batches(chunk.sequences):
            seen = self._look(micro).cpu()
            if indices:
                places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])
                found[:, places] = seen[:, : len(places)]  # what comes behind is padding
        # Each token is one rank's, so the sum is what that rank found.
        return Before(*self._ranks.sum(found).numpy())

    def _look(self, micro: MicroBatch) -> Tensor:
        """(3, R): what `Before` has of these tokens."""
        none, penalised = torch.zeros_like(micro.behaviour), self._algorithm.kl == "reward"
        logprobs = self._backend.evaluate(micro)[0] if self._several or penalised else none
        penalties, values = none, self._critic.values(micro) if self._critic else none
        if penalised:
            coefficient = self._algorithm.kl_coefficient
            penalties = reward_penalty(logprobs, self._distant(micro), micro.weights > 0, coefficient)
        return torch.stack([logprobs, penalties, values])

    def _distant(self, micro: MicroBatch) -> Tensor:
        assert self._reference is not None, "an algorithm with KL has a reference"
        return self._reference.logprobs(micro)

    def update(self, step: int) -> dict[str, float]:
        """The step's updates from what has been taken in; returns the metrics of the whole batch. An empty batch
        changes nothing."""
        totals, tokens, whole, norms = self._totals, 0, 0.0, []
        metrics = totals.metrics()
        for part in self._parts(step) if totals.tokens else ():
            self._add(part)
            tokens, whole = tokens + self._tokens, whole + self._divisor
            if self._updates >= self._alone:
                metrics |= self._meter.result(self._ranks, tokens, whole)
                norms.append(self._update(step, metrics["loss"]))
                metrics["learning_rate"], metrics["grad_norm"] = self._learning_rate(), float(np.mean(norms))
            if self._critic:
                rate = self._rate(self._critic_rate, self._updates, self._config.steps)
                metrics |= self._critic.update(step, self._tokens, rate)
            self._tokens, self._divisor = 0, 0.0
        self._begin()
        if self._reference is not None:
            self._reference.rest()
        if totals.tokens:
            self._updates += 1
        if norms:
            self._warn(step, metrics)
        return metrics

    def _parts(self, step: int) -> Iterator[Sequence[TrainSequence]]:
        """For each update of the step what it is made of, beside the gradients that are there."""
        if not self._several:
            yield ()
            return
        for round in range(self._config.updates_per_batch):
            order = np.random.default_rng((self._seed, step, round)).permutation(len(self._held))
            for part in np.array_split(order, self._config.mini_batches):
                if len(part):
                    yield [self._held[i] for i in part]

    def _update(self, step: int, loss: float) -> float:
        """Of the policy, from its gradients; returns their norm."""
        if not math.isfinite(loss):
            raise RunError(f"step {step}: the loss is {loss}; lower training.learning_rate")
        norm = self._backend.step(self._divisor, self._learning_rate())
        if not math.isfinite(norm):
            raise RunError(f"step {step}: the gradient is not finite; lower training.learning_rate")
        return norm

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        warning = alarm(metrics, self._algorithm.mismatch_alarm)
        metrics["mismatch/alarm"] = float(warning is not None)
        if warning and self._ranks.rank == 0:
            print(f"trainer: step {step}: {warning}", file=sys.stderr, flush=True)

    def state(self) -> dict[str, Tensor]:
        """What this rank needs to go on from here: a copy on the CPU. Gradients accumulated so far are no part."""
        state = self._backend.state() | {"updates": torch.tensor(self._updates), "rng": torch.get_rng_state()}
        if self._critic:
            state |= {f"{CRITIC}{name}": tensor for name, tensor in self._critic.state().items()}
        if self._ranks.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self._ranks.device)
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there. All ranks together."""
        self._backend.load_state(state)
        if self._critic:
            own = {name.removeprefix(CRITIC): value for name, value in state.items() if name.startswith(CRITIC)}
            self._critic.load_state(own)
        self._updates = int(state["updates"])
        torch.set_rng_state(state["rng"])
        if self._ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng.cuda"], self._ranks.device)

    def shards(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The full weights by hub name, in `model.dtype`, on the CPU, about 2 GiB at a time.

        Every rank must exhaust it (gathering is collective); ranks other than 0 get empty lists.
        """
        return full_shards(self._lm, self._backend, self._dtype, self._ranks.rank)

    def snapshot_shards(self) -> Iterator[list[tuple[str, Tensor]]]:
        """What engines get, in the same way: the full weights, or with `training.lora.publish: adapter` adapters."""
        lora = self._config.lora
        if lora is None or lora.publish == "merged":
            return self.shards()
        return iter([adapter_shard(self._lm, self._backend)])

    def _backward(self, micro: MicroBatch) -> None:
        reference = self._distant(micro) if self._algorithm.kl == "loss" else None
        logprobs, entropy, *routers = self._backend.forward(micro)
        mask = micro.weights > 0
        proximal = micro.proximal if self._several else logprobs.detach()
        inputs = TokenInputs(micro.behaviour, micro.advantages, micro.sequence, mask, proximal, reference)
        token = token_loss(logprobs, inputs, self._algorithm)
        if routers:
            token = with_router_loss(token, routers[0][micro.sequence], mask, self._algorithm.router_aux_loss)
        loss = weighted_sum(token.loss, token_weights(self._algorithm.aggregation, micro.sequence, mask))
        self._backend.backward(loss)
        self._meter.add(micro, loss.detach(), proximal, entropy.detach(), token)

    def _learning_rate(self) -> float:
        return self._rate(self._peak_rate, self._updates - self._alone, self._config.steps - self._alone)

    def _rate(self, peak: float, update: int, total: int) -> float:
        c = self._config
        return learning_rate(
            update,
            peak=peak,
            warmup=c.warmup_steps,
            total=total,
            schedule=c.learning_rate_schedule,
            min_ratio=c.min_learning_rate_ratio,
        )


def peak_rate(config: RunConfig) -> float:
    """The learning rate after warm-up."""
    shared = config.control.sync_every if config.control.learning_rate_scaling == "inverse_interval" else 1
    return config.training.learning_rate / shared
