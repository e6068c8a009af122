"""A run's policy on its backend: load, check, spread over the ranks.

Invariants:
- Rank 0 alone reads the model and checks that its packed path is right; the others build it without memory and receive
  their parts. So beside rank 0's CPU no rank holds more of it than it keeps (and a parameter or a layer on its way).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from forebay.config import RunConfig
from forebay.data.images import Pictures
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.training.backend import Backend
from forebay.training.critic import Critic, ValueModel
from forebay.training.distributed import Ranks
from forebay.training.learner import Learner
from forebay.training.logprobs import PolicyModel
from forebay.training.lora import add_adapters
from forebay.training.packing import TrainSequence, pack
from forebay.training.reference import BaseReference, Reference
from forebay.training.routers import Routers

RECOMPUTE_FROM = 64_000_000
"""Parameters from which activations are recomputed in the backward pass: below, they fit and recomputing costs 30%."""


class TrainEngine(Learner):
    """The learner of a run. All ranks construct and call it alike."""

    def __init__(self, run: RunContext, ranks: Ranks) -> None:
        torch.manual_seed(run.config.seed + ranks.rank)
        policy, lora = load_policy(run, ranks), run.config.training.lora
        if lora is not None:
            add_adapters(policy.lm, lora, run.config.seed)
        if run.config.algorithm.router_aux_loss:
            policy.routers = Routers(policy.lm)
        backend, reference, critic = _backend(run.config, ranks, policy), None, None
        if run.config.algorithm.kl != "none":
            reference = _reference(run, ranks) if lora is None else BaseReference(policy.lm, backend)
        if run.config.algorithm.advantage == "gae":
            module = load_critic(run, ranks, policy)
            critic = Critic(_backend(run.config, ranks, module), ranks, run.config.critic.clip)
        pictures = Pictures.of(run.images, run.start_model)
        super().__init__(run.config, ranks, policy.lm, backend, reference, critic, pictures)
        if ranks.rank == 0:
            a = run.config.algorithm
            print(f"trainer: {a.advantage}, {a.policy_loss} loss, correction {a.active_correction}", flush=True)


def load_policy(run: RunContext, ranks: Ranks, folder: Path | None = None) -> PolicyModel:
    """The start model, or that of a folder, ready for a backend: on rank 0 with its weights, on the other ranks on the
    meta device. Raises `RunError` if there is none, `UserError` if it cannot be trained here."""
    config, folder = run.config, folder or run.start_model
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    _quiet_transformers()
    try:
        lm = _read(folder, dtype) if ranks.rank == 0 else _outline(folder, dtype)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} cannot be loaded ({' '.join(str(error).split())})") from None
    if ranks.rank == 0:
        policy = _checked(lm.to(_whole_on(run, ranks)), config.generation.temperature, dtype)  # type: ignore[arg-type]
    else:
        policy = PolicyModel(lm, config.generation.temperature)
    if config.training.freeze_vision:
        _freeze_vision(lm)
    chosen = config.training.activation_checkpointing
    if chosen is True or (chosen == "auto" and sum(p.numel() for p in lm.parameters()) >= RECOMPUTE_FROM):
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


def _backend(config: RunConfig, ranks: Ranks, module: nn.Module) -> Backend:
    if config.training.backend == "fsdp2":
        from forebay.training.fsdp2 import Fsdp2Backend

        return Fsdp2Backend(module, config, ranks)
    from forebay.training.deepspeed_backend import DeepSpeedBackend

    return DeepSpeedBackend(module, config, ranks)


def load_critic(run: RunContext, ranks: Ranks, policy: PolicyModel) -> ValueModel:
    """Like `load_policy`, of `critic.model`. Raises `UserError` if it does not know all tokens of the policy."""
    model = run.config.critic.model
    base = load_policy(run, ranks, run.critic_model if model else None)
    needed, known = (each.lm.config.get_text_config().vocab_size for each in (policy, base))
    if known < needed:
        raise UserError(f"critic.model {model} knows {known} tokens, the policy {needed}: choose one of its family")
    if hasattr(policy.lm.config, "vision_config") and not hasattr(base.lm.config, "vision_config"):
        raise UserError(f"critic.model {model} reads no images, the policy does: choose one of its family")
    if (lora := run.config.training.lora) is not None:
        add_adapters(base.lm, lora, run.config.seed)
    return ValueModel(base, getattr(torch, run.config.model.dtype))


def _reference(run: RunContext, ranks: Ranks) -> Reference:
    config = run.config
    lm = _read(run.start_model, getattr(torch, config.model.dtype))
    policy = PolicyModel(lm, config.generation.temperature)
    return Reference(policy, ranks.device, config.algorithm.reference == "offload")


def _whole_on(run: RunContext, ranks: Ranks) -> torch.device:
    """Where rank 0 checks the model: on its device only if the whole model will stay there."""
    training = run.config.training
    stays = training.backend == "deepspeed" and training.zero_stage < 3
    return ranks.device if stays else torch.device("cpu")


def _read(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    lm: PreTrainedModel = _auto(config).from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return lm


def _outline(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The same model without memory for its weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        lm: PreTrainedModel = _auto(config).from_config(config, dtype=dtype, attn_implementation="sdpa")
    return lm


def _auto(config: Any) -> Any:
    """The class of transformers that builds such models."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _freeze_vision(lm: Any) -> None:
    if not hasattr(lm.config, "vision_config"):
        raise UserError("training.freeze_vision: the model of model.path has no vision tower; set it to false")
    lm.base_model.visual.requires_grad_(False)


def _checked(lm: PreTrainedModel, temperature: float, dtype: torch.dtype) -> PolicyModel:
    """Raises `UserError` unless packed sequences get the log-probabilities of single ones."""
    lm.train(False)
    sequences = _probe(lm.config.get_text_config().vocab_size)
    plain = torch.cat([_plain_logprobs(lm, s, temperature) for s in sequences])
    policy = PolicyModel(lm, temperature)
    with torch.no_grad():
        packed, _ = policy(pack(sequences).to(lm.device))
    gap = float((packed - plain).abs().max())
    if not gap < (1e-3 if dtype == torch.float32 else 0.5):
        raise UserError(
            f"model.path: {type(lm).__name__} gives other log-probabilities for packed sequences than for single ones "
            f"(by up to {gap:.2g}), so the trainer cannot use it"
        )
    return policy


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


def _quiet_transformers() -> None:
    hf_logging: Any = transformers_logging
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
