"""The policy under DeepSpeed ZeRO: one optimizer step from one batch, whole or in chunks, and the full weights back
out.

Invariants:
- The loss is a mean over the response tokens of the whole batch, so the split over ranks, chunks and micro-batches does
  not change the update.
- Every rank runs the same number of forward and backward passes.
- Nothing is updated from a loss that is not finite.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from forebay.config import RunConfig
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.training.batches import Chunk, Totals
from forebay.training.distributed import Ranks
from forebay.training.logprobs import PolicyModel
from forebay.training.losses import clipped_policy_loss, clipped_tokens, divergence
from forebay.training.packing import MicroBatch, TrainSequence, pack, plan_micro_batches
from forebay.training.zero import deepspeed_config, load_optimizer_state, optimizer_state, scaled_step

SHARD_BYTES = 2 << 30
"""Weights gathered, converted and written at a time."""
RECOMPUTE_FROM = 64_000_000
"""Parameters from which activations are recomputed in the backward pass: below, they fit and recomputing costs 30%."""


class TrainEngine:
    """All ranks construct and call it alike."""

    def __init__(self, run: RunContext, ranks: Ranks) -> None:
        import deepspeed

        config = run.config
        self._config, self._ranks = config.training, ranks
        self._dtype = getattr(torch, config.model.dtype)
        self._peak_rate = peak_rate(config)
        self._updates = 0
        self._totals, self._meter = Totals(), _Meter(ranks.device)
        torch.manual_seed(config.seed + ranks.rank)
        policy = _load_policy(run, self._dtype, ranks.device)
        self._lm = policy.lm
        optimizer = torch.optim.AdamW(
            _parameter_groups(policy, config.training.weight_decay),
            lr=self._peak_rate,
            betas=config.training.betas,
        )
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=deepspeed_config(config))

    def accumulate(self, chunk: Chunk) -> None:
        """Add the gradients of these groups to the step's. Nothing is divided yet: how many tokens the batch has is
        known when its last chunk is here."""
        self._totals += chunk.totals
        plan = plan_micro_batches([len(s) for s in chunk.sequences], self._ranks.world, self._config.micro_batch_tokens)
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
        metrics["learning_rate"] = self._set_learning_rate()
        metrics["grad_norm"] = scaled_step(self._engine, totals.tokens)
        self._updates += 1
        if not math.isfinite(metrics["grad_norm"]):
            raise RunError(f"step {step}: the gradient is not finite; lower training.learning_rate")
        return metrics

    def _backward(self, micro: MicroBatch) -> None:
        c = self._config
        logprobs, entropy = self._engine(micro)
        token_loss, ratio = clipped_policy_loss(logprobs, micro.behaviour, micro.advantages, c.clip_low, c.clip_high)
        loss = (token_loss * micro.weights).sum()
        # DeepSpeed takes the mean of the ranks' gradients; the loss is a sum over ranks.
        self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)
        with torch.no_grad():
            clipped = clipped_tokens(ratio, micro.advantages, c.clip_low, c.clip_high)
            self._meter.add(micro, loss, logprobs, ratio, entropy, clipped)

    def _set_learning_rate(self) -> float:
        warmup = self._config.warmup_steps
        rate = self._peak_rate * (min(1.0, (self._updates + 1) / warmup) if warmup else 1.0)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def state(self) -> dict[str, Tensor]:
        """What this rank needs to go on from here: a copy on the CPU. Gradients accumulated so far are no part."""
        state = optimizer_state(self._engine) | {"updates": torch.tensor(self._updates), "rng": torch.get_rng_state()}
        if self._ranks.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self._ranks.device)
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there. All ranks together."""
        load_optimizer_state(self._engine, state)
        self._updates = int(state["updates"])
        torch.set_rng_state(state["rng"])
        if self._ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng.cuda"], self._ranks.device)

    def shards(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The full weights by hub name, in `model.dtype`, on the CPU, about 2 GiB at a time.

        Every rank must exhaust it (gathering is collective); ranks other than 0 get empty lists.
        """
        return full_shards(self._lm, self._dtype, self._ranks.rank)


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


def full_shards(lm: PreTrainedModel, dtype: torch.dtype, rank: int) -> Iterator[list[tuple[str, Tensor]]]:
    """See `TrainEngine.shards`."""
    from deepspeed.runtime.zero import GatheredParameters

    for bucket in _buckets(lm, dtype.itemsize):
        with GatheredParameters([p for _, p in bucket if isinstance(p, nn.Parameter)], modifier_rank=None):
            # copy: the gathered weights are gone when the context ends.
            full = {n: p.detach().to("cpu", dtype, copy=True) for n, p in bucket} if rank == 0 else {}
        yield [(n, t.contiguous()) for n, t in revert_weight_conversion(lm, full).items()] if full else []


def _load_policy(run: RunContext, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    hf_logging: Any = transformers_logging
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            run.start_model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise RunError(f"{run.start_model} cannot be loaded ({' '.join(str(error).split())})") from None
    if run.config.training.zero_stage < 3:
        nn.Module.to(lm, device)
    lm.train(False)
    sequences = _probe(lm.config.get_text_config().vocab_size)
    plain = torch.cat([_plain_logprobs(lm, s, run.config.generation.temperature) for s in sequences])
    policy = PolicyModel(lm, run.config.generation.temperature)
    with torch.no_grad():
        packed, _ = policy(pack(sequences).to(lm.device))
    gap = float((packed - plain).abs().max())
    if not gap < (1e-3 if dtype == torch.float32 else 0.5):
        raise UserError(
            f"model.path: {type(lm).__name__} gives other log-probabilities for packed sequences than for single ones "
            f"(by up to {gap:.2g}), so the trainer cannot use it"
        )
    if sum(p.numel() for p in lm.parameters()) >= RECOMPUTE_FROM:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


def _probe(vocabulary: int) -> list[TrainSequence]:
    """Two short sequences, to see that neither can look into the other."""
    ids = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(32)]
    return [
        TrainSequence(ids[:4], ids[4:20], [0.0] * 16, 0.0, False),
        TrainSequence(ids[20:23], ids[23:], [0.0] * 9, 0.0, False),
    ]


@torch.no_grad()
def _plain_logprobs(lm: PreTrainedModel, sequence: TrainSequence, temperature: float) -> Tensor:
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.ids]], device=lm.device)
    logits: Tensor = lm(input_ids=ids, use_cache=False).logits
    logits = logits[0, len(sequence.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(sequence.prompt_ids) :, None])[:, 0]


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _buckets(lm: nn.Module, itemsize: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Parameters (each once, however often it is tied) and saved buffers, in buckets of at most `SHARD_BYTES`."""
    saved = lm.state_dict().keys()
    tensors = [*lm.named_parameters(), *((n, b) for n, b in lm.named_buffers() if n in saved)]
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        # Under ZeRO-3 the parameter itself is empty; ds_numel is its full size.
        nbytes = getattr(tensor, "ds_numel", tensor.numel()) * itemsize
        if bucket and size + nbytes > SHARD_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    yield bucket
