"""The policy as the trainer sees it: packed tokens in, log-probabilities of the response tokens out.

Invariants:
- Every weight is touched inside the `forward` of the module that owns it, and nowhere else: ZeRO-3 and FSDP2 gather a
  module's weights for the time of its forward and of its backward pass.
- The logits of all tokens are never there at the same time, and are float32 (`token_logprobs`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forebay.errors import UserError
from forebay.training.attention import PACKED, register
from forebay.training.packing import MicroBatch
from forebay.training.routers import Routers
from forebay.training.token_logprobs import token_logprobs
from forebay.training.vision import ImageBatch

_TRANSFORMED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class LogprobHead(nn.Linear):
    """The language-model head of a model that is already built (its class is swapped, so that tying is kept)."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Without targets: logits. With: `token_logprobs` of hidden states (R, d)."""
        if targets is None:
            return F.linear(hidden, self.weight, self.bias)
        return token_logprobs(hidden, self.weight, self.bias, targets, temperature, entropy_gradient=entropy_gradient)


class PolicyModel(nn.Module):
    """A Hugging Face causal LM with packed attention and a `LogprobHead`. Raises `UserError` if the model has parts
    that this path would leave out."""

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        head = lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise UserError(f"model.path: {type(lm).__name__} has no plain linear language-model head; choose another")
        scaled = [n for n in _TRANSFORMED_LOGITS if getattr(lm.config, n, None) not in (None, 1, 1.0)]
        if scaled:
            raise UserError(f"model.path: {type(lm).__name__} transforms its logits ({scaled[0]}): not supported")
        head.__class__ = LogprobHead
        for module in lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.lm: Any = lm
        self.temperature = temperature
        self.routers: Routers | None = None
        """Set: their loss is wanted."""
        register()
        # In the vision tower an image sees itself only, which transformers' own attention knows.
        tower = hasattr(lm.config, "vision_config")
        lm.set_attn_implementation({"text_config": PACKED, "vision_config": "sdpa"} if tower else PACKED)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """(log-probabilities, entropies) of the response tokens at the rollout temperature; each (R,), float32. With
        gradients, and a loss of the routers: that too, (S,)."""
        if self.routers is None or not torch.is_grad_enabled():
            return self._logprobs(batch)
        with self.routers.watched() as logits:
            logprobs, entropies = self._logprobs(batch)
        return logprobs, entropies, self.routers.loss(logits, batch.starts)

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.lm.get_output_embeddings()(
            response_states(self.lm.base_model, batch), batch.targets, self.temperature
        )
        return result


def response_states(trunk: Any, batch: MicroBatch) -> Tensor:
    """(R, d): the last hidden state before each response token. `trunk`: a language model without its head, or with a
    vision tower before it."""
    inputs = {"input_ids": batch.input_ids}
    if batch.images is not None:
        inputs = {"inputs_embeds": _embedded(trunk, batch.input_ids, batch.images)}
        trunk = trunk.language_model
    # No mask and no cache, ever: either would make transformers build a mask of its own (see attention.py).
    hidden: Tensor = trunk(
        **inputs,
        position_ids=batch.position_ids,
        use_cache=False,
        cu_seq_lens_q=batch.starts,
        cu_seq_lens_k=batch.starts,
        max_length_q=batch.longest,
        max_length_k=batch.longest,
    ).last_hidden_state
    return hidden[0, batch.sources]


def _embedded(trunk: Any, input_ids: Tensor, images: ImageBatch) -> Tensor:
    """(1, T, d): the tokens' embeddings, with the images' features in their places. transformers would find the places
    itself, by the token, and refuse a response that has it too."""
    seen = trunk.visual(images.values, grid_thw=images.grids).pooler_output
    tokens: Tensor = trunk.get_input_embeddings()(input_ids)
    return tokens.index_copy(1, images.places, seen[images.features][None].to(tokens.dtype))
