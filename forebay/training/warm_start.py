"""The supervised start of the built-in model: from random weights to a fair beginner, in a fixed number of steps.

Invariants:
- The result depends on the examples, the settings and the seed, not on how fast the machine is.
- Only response tokens (the end token among them) are learned; the prompt is context.
- The caller's number of torch threads is as before afterwards.

Matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/, Nesterov momentum 0.95, weight decay 0.01),
embeddings and norms with AdamW: on this model that learns about twice as fast as AdamW alone.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from forebay.config import WarmStartConfig
from forebay.training.tiny_model import ASSISTANT, END, USER, TinyQwen3

DrawExample = Callable[[random.Random], tuple[str, str]]
"""Draws a (prompt, response) to learn from."""
OnProgress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, mean loss of the last steps)."""

_WARMUP_STEPS, _CONSTANT_SHARE, _LAST_RATE = 20, 0.3, 0.02
_POOL = 1024
_REPORT_EVERY = 50
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """What the warm start did."""

    loss: float
    """Mean cross-entropy in nats per response token, last steps."""
    tokens: int
    """Tokens read, padding included."""
    seconds: float


class Muon:
    """Muon over stacks of matrices (layers, rows, columns): momentum, then the nearest orthogonal matrix, per layer."""

    def __init__(self, stacks: Sequence[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        self.stacks, self.lr, self.momentum, self.weight_decay = list(stacks), lr, momentum, weight_decay
        self.buffers = [torch.zeros_like(stack) for stack in self.stacks]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak learning rate."""
        rate = self.lr * scale
        for stack, buffer in zip(self.stacks, self.buffers, strict=True):
            assert stack.grad is not None
            buffer.lerp_(stack.grad, 1 - self.momentum)
            update = orthogonalize(stack.grad.lerp(buffer, self.momentum))
            rows, columns = stack.shape[1:]
            stack.mul_(1 - rate * self.weight_decay)
            stack.sub_(update, alpha=rate * max(1.0, rows / columns) ** 0.5)


def orthogonalize(matrices: Tensor, iterations: int = 4) -> Tensor:
    """(n, rows, columns) -> about the same with all singular values near 1, by Muon's quintic Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def warm_start(
    model: TinyQwen3,
    tokenizer: Tokenizer,
    draw: DrawExample,
    config: WarmStartConfig,
    seed: int,
    on_progress: OnProgress | None = None,
) -> WarmStartResult:
    """Train `model` in place on `config.steps` batches of drawn examples."""
    began = time.monotonic()
    adamw = torch.optim.AdamW(
        [model.embedding, model.final_norm, *model.norms.values()],
        lr=config.adamw_lr,
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    muon = Muon(list(model.matrices.values()), config.muon_lr)
    batches = _batches(tokenizer, draw, config.tokens_per_step, random.Random(f"warm start {seed}"))
    losses: list[float] = []
    tokens = 0
    with _few_threads():
        for step in range(config.steps):
            ids, learned = next(batches)
            loss = _loss(model, ids, learned)
            model.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale = rate_at(step, config.steps)
            adamw.param_groups[0]["lr"] = config.adamw_lr * scale
            adamw.step()
            muon.step(scale)
            losses = [*losses[1 - _REPORT_EVERY :], float(loss.detach())]
            tokens += ids.numel()
            if on_progress and ((step + 1) % _REPORT_EVERY == 0 or step + 1 == config.steps):
                on_progress(step + 1, config.steps, sum(losses) / len(losses))
    return WarmStartResult(sum(losses) / len(losses), tokens, time.monotonic() - began)


def rate_at(step: int, steps: int) -> float:
    """Learning rate as a share of the peak: linear warm-up, constant for 30 %, linear to 2 %."""
    decay = max(0.0, step / steps - _CONSTANT_SHARE) / (1 - _CONSTANT_SHARE)
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - (1 - _LAST_RATE) * decay)


def _loss(model: TinyQwen3, ids: Tensor, learned: Tensor) -> Tensor:
    # The logits are computed only where there is something to learn, about a third of the tokens.
    targets = learned[:, 1:]
    states = model.hidden(ids[:, :-1])[targets]
    return F.cross_entropy(states @ model.embedding.T, ids[:, 1:][targets])


def _batches(
    tokenizer: Tokenizer, draw: DrawExample, budget: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, learned) of at most `budget` tokens, padded on the right; examples of like length together."""
    while True:
        drawn = [draw(rng) for _ in range(_POOL)]
        prompts = tokenizer.encode_batch([f"{USER}{prompt}{ASSISTANT}" for prompt, _ in drawn])
        responses = tokenizer.encode_batch([f"{response}{END}" for _, response in drawn])
        examples = sorted(
            ((one.ids, other.ids) for one, other in zip(prompts, responses, strict=True)),
            key=lambda pair: len(pair[0]) + len(pair[1]),
        )
        pool = list(_cut(examples, budget))
        rng.shuffle(pool)
        yield from map(_pad, pool)


def _cut(examples: list[tuple[list[int], list[int]]], budget: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    batch: list[tuple[list[int], list[int]]] = []
    for example in examples:
        if batch and (len(batch) + 1) * (len(example[0]) + len(example[1])) > budget:
            yield batch
            batch = []
        batch.append(example)
    yield batch


def _pad(batch: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    learned = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        learned[row, len(prompt) : end] = True
    return ids, learned


@contextmanager
def _few_threads() -> Iterator[None]:
    # The operations are small: beyond a few threads they only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
