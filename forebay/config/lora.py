"""Adapters in place of a full update. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from forebay.config.base import Config


class LoraConfig(Config):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): chosen linear layers compute with W + alpha / rank x B A; only A and B
    are trained, and the head of a critic, which has adapters too. Learning rates are about ten times those of a full
    update."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters, times 1 / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapters' inputs in an update's passes. Above 0 their log-probs are noisy: ratios and `mismatch/*` then
    differ from those of equal weights."""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """Last parts of the names of linear layers, like `q_proj`; null: all linear layers of the decoder. A mixture of
    experts keeps its experts in tensors that are no such layers: there null means the attention."""
    publish: Literal["merged", "adapter"] = "merged"
    """What goes to the engines: full weights with the adapters merged into them, or A and B alone, which each engine
    merges into the start model that it has (a snapshot of some megabytes). The trained model is always merged."""
