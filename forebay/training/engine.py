"""The policy under DeepSpeed ZeRO: one optimizer step from one batch, and the full weights back out.

Invariants:
- The loss is a mean over the response tokens of the whole batch, so the split over ranks and micro-batches does not
  change the update.
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
from forebay.training.batches import TrainBatch
from forebay.training.distributed import Ranks
from forebay.training.logprobs import PolicyModel
from forebay.training.losses import clipped_policy_loss, clipped_tokens, divergence
from forebay.training.packing import MicroBatch, TrainSequence, pack, plan_micro_batches

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
        self._updates = 0
        torch.manual_seed(config.seed + ranks.rank)
        policy = _load_policy(run, self._dtype, ranks.device)
        self._lm = policy.lm
        optimizer = torch.optim.AdamW(
            _parameter_groups(policy, config.training.weight_decay),
            lr=config.training.learning_rate,
            betas=config.training.betas,
        )
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=deepspeed_config(config))

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One update; returns the metrics of the whole batch. An empty batch changes nothing."""
        if not batch.sequences:
            return batch.metrics
        plan = plan_micro_batches([len(s) for s in batch.sequences], self._ranks.world, self._config.micro_batch_tokens)
        meter = _Meter(self._ranks.device)
        for indices in plan[self._ranks.rank]:
            micro = pack([batch.sequences[i] for i in indices]).to(self._ranks.device)
            self._backward(micro, batch.tokens, meter)
        metrics = batch.metrics | meter.result(self._ranks, batch.tokens)
        if not math.isfinite(metrics["loss"]):
            raise RunError(f"step {batch.step}: the loss is {metrics['loss']}; lower training.learning_rate")
        metrics["learning_rate"] = self._set_learning_rate()
        self._engine.step()
        self._updates += 1
        metrics["grad_norm"] = float(self._engine.get_global_grad_norm())
        if not math.isfinite(metrics["grad_norm"]):
            raise RunError(f"step {batch.step}: the gradient is not finite; lower training.learning_rate")
        return metrics

    def _backward(self, micro: MicroBatch, tokens: int, meter: "_Meter") -> None:
        c = self._config
        logprobs, entropy = self._engine(micro)
        token_loss, ratio = clipped_policy_loss(logprobs, micro.behaviour, micro.advantages, c.clip_low, c.clip_high)
        loss = (token_loss * micro.weights).sum() / tokens
        # DeepSpeed takes the mean of the ranks' gradients; the loss is a sum over ranks.
        self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)
        with torch.no_grad():
            clipped = clipped_tokens(ratio, micro.advantages, c.clip_low, c.clip_high)
            meter.add(micro, loss, logprobs, ratio, entropy, clipped)

    def _set_learning_rate(self) -> float:
        warmup = self._config.warmup_steps
        factor = min(1.0, (self._updates + 1) / warmup) if warmup else 1.0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._config.learning_rate * factor
        return self._config.learning_rate * factor

    def shards(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The full weights by hub name, in `model.dtype`, on the CPU, about 2 GiB at a time.

        Every rank must exhaust it (gathering is collective); ranks other than 0 get empty lists.
        """
        return full_shards(self._lm, self._dtype, self._ranks.rank)


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
            "loss": loss,
            "clip_fraction": clipped / tokens,
            "entropy": entropy / tokens,
            "ratio_max": ratio_max,
        }
        if current:
            metrics |= {"mismatch/kl_mean": mismatch / current, "mismatch/max_abs": gap_max}
        return metrics


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Unmanaged accumulation: each backward pass adds up, each `step()` is the boundary, so the number of
    micro-batches may differ from step to step."""
    bf16 = config.model.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.training.grad_clip,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": config.training.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": bf16},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
    }


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
