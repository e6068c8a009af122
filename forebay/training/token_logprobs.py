"""Log-probabilities and entropies of tokens from hidden states, without the logits of all of them.

Invariants:
- Of the (tokens, vocabulary) logits there is never more than one tile, and none is kept for the backward pass, which
  computes them again.
- Logits, log-softmax and entropy are float32 whatever the weights are: a bfloat16 log-probability is off by 0.015, a
  whole clip range over a few dozen tokens. Sums of gradients are float32 too.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_TILE, GPU_TILE = 1 << 20, 1 << 25
"""Logits in a tile. 4 MiB in float32: it stays in the cache of a CPU, where the passes over it cost little beside the
matrix products. 128 MiB on a GPU: enough to keep it busy."""
LOWEST = -1e30
"""Below every logit, and finite, so that the difference of two is a number."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the targets, entropies in nats) of softmax((hidden weight' + bias) / temperature), each
    (R,), float32, or float64 if the input is.

    hidden (R, d), weight (V, d), bias (V,), targets (R,) int64. Gradients flow to hidden, weight and bias; those of the
    entropies only with `entropy_gradient`. A target outside the vocabulary gives NaN. `tile`: logits in memory at a
    time (default: `CPU_TILE` or `GPU_TILE`).
    """
    if tile is None:
        tile = CPU_TILE if hidden.device.type == "cpu" else GPU_TILE
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(hidden, weight, bias, targets, temperature, entropy_gradient, tile)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the inputs and two numbers a token: log-sum-exp and entropy.

    With z the logits over the temperature, p their softmax, t the target and H = -sum_j p_j log p_j:
    d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        with _Tiles(hidden, weight, bias, targets, temperature, tile) as tiles:
            partition, entropies, chosen = _statistics(tiles)
        ctx.save_for_backward(hidden, weight, bias, targets, partition, entropies if entropy_gradient else None)
        ctx.temperature, ctx.tile = temperature, tile
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return chosen - partition, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        # Saved, not copied: the parameter itself, which ZeRO-3 and FSDP2 have gathered again by now.
        hidden, weight, bias, targets, partition, entropies = ctx.saved_tensors
        if by_logprobs is None:
            by_logprobs = torch.zeros_like(partition)
        wanted = ctx.needs_input_grad
        with _Tiles(hidden, weight, bias, targets, ctx.temperature, ctx.tile) as tiles:
            by_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if wanted[0] else None
            by_weight = torch.empty_like(weight) if wanted[1] else None
            by_bias = torch.empty_like(bias) if wanted[2] else None
            for columns in tiles.columns():
                weight_sum = torch.zeros_like(tiles.weight, dtype=tiles.dtype)
                bias_sum = partition.new_zeros(len(tiles.weight))
                for rows in tiles.rows():
                    z = _by_logits(tiles, rows, partition, by_logprobs, entropies, by_entropies)
                    if by_bias is not None:
                        bias_sum += z.sum(0)
                    z = z.to(tiles.weight.dtype)
                    if by_hidden is not None:
                        tiles.multiply(z, tiles.weight, by_hidden[rows], add=True)
                    if by_weight is not None:
                        tiles.multiply(z.t(), tiles.hidden[rows], weight_sum, add=True)
                if by_weight is not None:
                    by_weight[columns] = weight_sum
                if by_bias is not None:
                    by_bias[columns] = bias_sum
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return by_hidden, by_weight, by_bias, None, None, None, None


def _statistics(tiles: "_Tiles") -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, entropy, the target's logit) of each token, in one pass over the vocabulary."""
    # So far: maximum m, sum of exp(z - m), sum of (z - m) exp(z - m), the target's logit.
    highest, mass, moment, chosen = (torch.zeros_like(tiles.targets, dtype=tiles.dtype) for _ in range(4))
    highest.fill_(LOWEST)
    chosen.fill_(math.nan)
    for _ in tiles.columns():
        for rows in tiles.rows():
            z = tiles.logits(rows)
            place, hit = tiles.place(rows)
            chosen[rows] = torch.where(hit, z.gather(1, place[:, None])[:, 0], chosen[rows])
            before = highest[rows]
            now = torch.maximum(before, z.amax(1))
            e = torch.exp(z.sub_(now[:, None]), out=tiles.scratch(z))
            rise = before - now
            moment[rows] = (moment[rows] + mass[rows] * rise) * rise.exp() + z.mul_(e).sum(1)
            mass[rows] = mass[rows] * rise.exp() + e.sum(1)
            highest[rows] = now
    log_mass = mass.log()
    return highest + log_mass, log_mass - moment / mass, chosen


def _by_logits(
    tiles: "_Tiles",
    rows: slice,
    partition: Tensor,
    by_logprobs: Tensor,
    entropies: Tensor | None,
    by_entropies: Tensor | None,
) -> Tensor:
    """The gradient of one tile of hidden weight' + bias."""
    z = tiles.logits(rows).sub_(partition[rows, None])
    factor = by_logprobs[rows, None]
    if entropies is not None and by_entropies is not None:
        factor = (z + entropies[rows, None]).mul_(by_entropies[rows, None]).add_(factor)
    z.exp_().mul_(factor).neg_()
    place, hit = tiles.place(rows)
    # The target's 1 comes in before any rounding: where the policy is sure, 1 - p is small.
    z.scatter_add_(1, place[:, None], (by_logprobs[rows] * hit)[:, None])
    return tiles.scaled(z)


class _Tiles:
    """The logits over the temperature, tile after tile in the same memory.

    The vocabulary is the outer loop: each row of the weight's gradient is then complete before it is rounded to the
    weight's type.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, size: int
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        """Of logits and sums."""
        cpu = hidden.device.type == "cpu"
        # A GPU multiplies bfloat16 into float32; a CPU does so with float32 that holds bfloat16 values (`__enter__`).
        operands = self.dtype if cpu else hidden.dtype
        self._narrowed, self._widening = cpu and hidden.dtype == torch.bfloat16, operands != self.dtype
        self.hidden, self.targets, self.weight = hidden.to(operands), targets, weight[:0].to(operands)
        """`weight`: of the present columns."""
        self._all_weights, self._bias, self._temperature, self._first = weight, bias, temperature, 0
        tokens, vocabulary = max(len(hidden), 1), len(weight)
        self._height = min(tokens, max(size // min(vocabulary, math.isqrt(size)), 1))
        self._width = min(vocabulary, max(size // self._height, 1))
        self._memory = hidden.new_empty((2, self._height * self._width), dtype=self.dtype)

    def __enter__(self) -> "_Tiles":
        """Have the CPU multiply at bfloat16 speed (where it has units for it, several times that of float32), which
        rounds operands to bfloat16 and sums in float32."""
        mkldnn: Any = torch.backends.mkldnn
        self._precision = mkldnn.matmul.fp32_precision
        if self._narrowed:
            mkldnn.matmul.fp32_precision = "bf16"
        return self

    def __exit__(self, *_: object) -> None:
        mkldnn: Any = torch.backends.mkldnn
        if self._narrowed:
            mkldnn.matmul.fp32_precision = self._precision

    def columns(self) -> Iterator[slice]:
        """Goes over the vocabulary; what follows is about these columns."""
        for first in range(0, len(self._all_weights), self._width):
            columns = slice(first, first + self._width)
            self.weight, self._first = self._all_weights[columns].to(self.hidden.dtype), first
            yield columns

    def rows(self) -> Iterator[slice]:
        """Goes over the tokens."""
        for first in range(0, len(self.hidden), self._height):
            yield slice(first, first + self._height)

    def logits(self, rows: slice) -> Tensor:
        """(rows, columns); valid until the next call."""
        hidden = self.hidden[rows]
        z = self._view(0, len(hidden), len(self.weight))
        self.multiply(hidden, self.weight.t(), z, add=False)
        if self._bias is not None:
            z.add_(self._bias[self._first : self._first + len(self.weight)])
        return self.scaled(z)

    def scaled(self, z: Tensor) -> Tensor:
        """z / temperature, in place."""
        return z.div_(self._temperature) if self._temperature != 1.0 else z

    def scratch(self, like: Tensor) -> Tensor:
        """A second tile."""
        return self._view(1, *like.shape)

    def place(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(column of each row's target, or any if it is in another tile; whether it is in this one)."""
        place = self.targets[rows] - self._first
        inside = place.clamp(0, len(self.weight) - 1)
        return inside, inside == place

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
        """out = left right, or out += left right."""
        if self._widening:
            torch.addmm(out, left, right, beta=int(add), out_dtype=self.dtype, out=out)
        else:
            torch.addmm(out, left, right, beta=int(add), out=out)

    def _view(self, which: int, height: int, width: int) -> Tensor:
        return self._memory[which, : height * width].view(height, width)
