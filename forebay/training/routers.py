"""The load-balancing loss of a mixture of experts' routers.

Invariants:
- It has one value for each sequence, which depends on nothing beside this sequence: no packing changes it, no number
  of ranks or micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forebay.errors import UserError


class Routers:
    """Of a model; raises `UserError` if it has none that transformers knows."""

    def __init__(self, lm: Any) -> None:
        recorder = (getattr(lm, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        self._routers = [module for module in lm.modules() if kind is not None and isinstance(module, kind)]
        if not self._routers:
            raise UserError(
                f"algorithm.router_aux_loss: {type(lm).__name__} has no routers that transformers tells of: set it to 0"
            )
        self._place = getattr(recorder, "index", 0)
        self._chosen = int(lm.config.get_text_config().num_experts_per_tok)

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Fills the list with each layer's logits, (T, experts), of the forward pass within."""
        logits: list[Tensor] = []

        def take(_module: nn.Module, _inputs: Any, output: Any) -> None:
            logits.append(output[self._place] if isinstance(output, tuple) else output)

        hooks = [router.register_forward_hook(take) for router in self._routers]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self, logits: list[Tensor], starts: Tensor) -> Tensor:
        """(S,) float32; `starts` as in `MicroBatch`. See `balance_loss`."""
        return torch.stack([balance_loss(layer, starts, self._chosen) for layer in logits]).mean(0)


def balance_loss(logits: Tensor, starts: Tensor, chosen: int) -> Tensor:
    """(S,) float32: experts x sum over experts of f P of each sequence. f: how often its tokens choose the expert among
    their `chosen` ones, for each token; P: the mean probability that they give it. `chosen` if all is even.

    Switch Transformer (Fedus et al. 2021, arXiv 2101.03961), equations 4 to 6, of each sequence on its own as in
    DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20): transformers' `load_balancing_loss_func` of one sequence and one
    layer."""
    experts, lengths = logits.shape[-1], starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=logits.device), lengths)
    probabilities = logits.float().softmax(-1)
    choices = F.one_hot(probabilities.topk(chosen, -1).indices, experts).sum(1).float()
    empty = torch.zeros(len(lengths), experts, device=logits.device)
    given, taken = (empty.index_add(0, sequence, each) / lengths[:, None] for each in (probabilities, choices))
    return experts * (given * taken).sum(-1)
