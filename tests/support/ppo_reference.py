"""PPO with a critic in plain torch and numpy: one sequence at a time, no packing, each formula written out."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.float64]


def targets(
    rewards: Sequence[Floats], values: Sequence[Floats], gamma: float, lam: float
) -> tuple[list[Floats], list[Floats]]:
    """(advantages whitened over all tokens, returns) of each response, with A_t = sum over k of (gamma lam)^k
    delta_{t+k}."""
    plain = []
    for r, v in zip(rewards, values, strict=True):
        n = len(r)
        deltas = [r[t] + (gamma * v[t + 1] if t + 1 < n else 0.0) - v[t] for t in range(n)]
        plain.append(np.array([sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]))
    everything = np.concatenate(plain)
    mean, variance = everything.mean(), everything.var(ddof=1) if len(everything) > 1 else 0.0
    white = [(a - mean) / math.sqrt(variance + 1e-8) for a in plain]
    return white, [a + v for a, v in zip(plain, values, strict=True)]


@dataclass(frozen=True)
class Settings:
    temperature: float
    gamma: float
    lam: float
    clip_low: float
    clip_high: float
    value_clip: float
    updates: int
    parts: int
    alone: int
    """Steps of the critic without the policy."""
    seed: int


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    """Of the policy: of each step that trains it, the mean over the tokens of its updates."""
    norms: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    """Of each step with groups."""
    explained: list[float] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    """Of the probe, before each step."""
    values: list[list[float]] = field(default_factory=list)


class PlainPpo:
    """Policy, critic and their optimizers; `optimizer` makes one from the named parameters of a module."""

    def __init__(self, lm: Any, settings: Settings, optimizer: Callable[[dict[str, nn.Parameter]], Any]) -> None:
        self.lm, self.settings, self.trace = lm, settings, Trace()
        self.trunk, self.head = copy.deepcopy(lm.base_model), nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        critic = {**dict(self.trunk.named_parameters()), "head.weight": self.head.weight, "head.bias": self.head.bias}
        self._named = [dict(lm.named_parameters()), critic]
        self._optimizers = [optimizer(named) for named in self._named]

    def logprobs(self, prompt: list[int], ids: list[int]) -> Tensor:
        logits = self.lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits / self.settings.temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]

    def values(self, prompt: list[int], ids: list[int]) -> Tensor:
        states = self.trunk(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).last_hidden_state
        return self.head(states[0, len(prompt) - 1 : -1])[:, 0]

    def probe(self, prompt: list[int], ids: list[int]) -> None:
        with torch.no_grad():
            self.trace.logprobs.append(self.logprobs(prompt, ids).tolist())
            self.trace.values.append(self.values(prompt, ids).tolist())

    def step(self, number: int, groups: list[dict[str, Any]], rates: tuple[float, float], clip: float) -> None:
        """`rates`: learning rates of policy and critic; `clip`: largest norm of a gradient."""
        c, trace = self.settings, self.trace
        taught = [(g["prompt_ids"], s) for g in groups for s in g["samples"] if s["ids"]]
        with torch.no_grad():
            proximal = [self.logprobs(prompt, s["ids"]) for prompt, s in taught]
            values = [self.values(prompt, s["ids"]) for prompt, s in taught]
        rewards = [np.array([0.0] * (len(s["ids"]) - 1) + [s["reward"]]) for _, s in taught]
        advantages, returns = targets(rewards, [v.double().numpy() for v in values], c.gamma, c.lam)
        every, seen = np.concatenate(returns), np.concatenate([v.double().numpy() for v in values])
        trace.explained.append(1 - float((every - seen).var() / every.var()))
        sums, norms, tokens = [0.0, 0.0], [], 0
        for round in range(c.updates):
            order = np.random.default_rng((c.seed, number, round)).permutation(len(taught))
            for part in (part for part in np.array_split(order, c.parts) if len(part)):
                count, policy, critic = 0, torch.zeros(()), torch.zeros(())
                for i in part:
                    prompt, sample = taught[i]
                    count += len(sample["ids"])
                    own, a = self.logprobs(prompt, sample["ids"]), torch.tensor(advantages[i], dtype=torch.float32)
                    w = (proximal[i] - torch.tensor(sample["logprobs"])).exp()  # decoupled
                    ratio = (own - proximal[i]).exp()
                    bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
                    policy = policy - (w * torch.where(ratio * a < bounded * a, ratio * a, bounded * a)).sum()
                    v, target = self.values(prompt, sample["ids"]), torch.tensor(returns[i], dtype=torch.float32)
                    near = values[i] + (v - values[i]).clamp(-c.value_clip, c.value_clip)
                    critic = critic + 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2).sum()
                tokens += count
                for place, loss in enumerate((policy, critic)):
                    if place == 0 and len(trace.value_losses) < c.alone:
                        continue
                    sums[place] += float(loss.detach())
                    norm = self._apply(place, loss / count, rates[place], clip)
                    if place == 0:
                        norms.append(norm)
        if norms:
            trace.losses.append(sums[0] / tokens)
            trace.norms.append(float(np.mean(norms)))
        trace.value_losses.append(sums[1] / tokens)

    def _apply(self, place: int, loss: Tensor, rate: float, clip: float) -> float:
        optimizer = self._optimizers[place]
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = float(nn.utils.clip_grad_norm_(self._named[place].values(), clip))
        optimizer.step()
        return norm
