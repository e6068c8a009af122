"""How far engine and trainer disagree: about tokens that the version in training sampled, where they should not, and
about all tokens, where the age of the samples comes on top.

Invariants:
- Sums and maxima only, on the device and in float64: they add over micro-batches, and over ranks by one sum and one
  maximum. Nothing waits for the device before `result`.
- No gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.training.algorithms.tokens import kept, log_ratio


@dataclass(slots=True)
class Mismatch:
    """d = trainer's - engine's log-probability of a token that the engine sampled; clamped to +-20 but in |d|."""

    sums: Tensor
    """(6,): tokens, |d|, k1 = -d, k3 = exp(d) - 1 - d, w = exp(d), w^2."""
    maxima: Tensor
    """(1,): |d|."""

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Mismatch":
        """Of no tokens."""
        return cls(*(torch.zeros(n, dtype=torch.float64, device=device) for n in (6, 1)))

    @torch.no_grad()
    def add(self, engine: Tensor, trainer: Tensor, mask: Tensor) -> None:
        """Take in the tokens (R,) where the mask is True."""
        engine, trainer = kept(engine.double(), mask), kept(trainer.double(), mask)
        gap, d = (trainer - engine).abs(), log_ratio(trainer, engine)
        w = d.exp()
        terms = torch.stack([torch.ones_like(d), gap, -d, w - 1.0 - d, w, w.square()])
        self.sums += kept(terms, mask).sum(1)
        if gap.numel():
            self.maxima = torch.maximum(self.maxima, gap.max())

    def merge(self, other: "Mismatch") -> "Mismatch":
        """Of the tokens of both."""
        return Mismatch(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def result(self, name: str = "mismatch") -> dict[str, float]:
        """Nothing if there were no tokens. `<name>/`
        mean_abs, max_abs: of the difference of log-probabilities;
        kl_k1, kl_mean: KL(engine || trainer) by k1 and by k3 (never negative, of less variance);
        perplexity_ratio: trainer's / engine's perplexity of these tokens, exp(mean k1);
        effective_sample_size: (sum w)^2 / (n sum w^2), the share of tokens that importance weights would leave; 1 if
        all weights are equal."""
        tokens, gap, k1, k3, w, w_squared = self.sums.tolist()
        if not tokens:
            return {}
        return {
            f"{name}/mean_abs": gap / tokens,
            f"{name}/max_abs": float(self.maxima),
            f"{name}/kl_k1": k1 / tokens,
            f"{name}/kl_mean": k3 / tokens,
            f"{name}/perplexity_ratio": float(torch.tensor(k1 / tokens, dtype=torch.float64).exp()),
            f"{name}/effective_sample_size": w * w / (tokens * w_squared),
        }


def alarm(metrics: dict[str, float], threshold: float) -> str | None:
    """What to warn of, given the metrics of a step: nothing while the mean absolute difference is within bounds."""
    gap = metrics.get("mismatch/mean_abs", 0.0)
    if gap <= threshold:
        return None
    return (
        f"engine and trainer disagree: their log-probabilities of the same tokens under the same weights differ by "
        f"{gap:.3g} on average (algorithm.mismatch_alarm is {threshold:g}); set model.dtype to float32, or "
        "algorithm.correction to icepop or tis_token"
    )
