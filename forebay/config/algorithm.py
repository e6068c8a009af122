"""What is learnt from a batch. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from forebay.config.base import Config
from forebay.config.sections import Natural, Positive

Correction = Literal["behaviour", "decoupled", "tis_token", "tis_sequence", "icepop", "reject_sequence", "none"]


class CriticConfig(Config):
    """The value function of `algorithm.advantage: gae`; unused without it. Backend, schedule of the learning rate,
    AdamW and gradient norm are those of `training`."""

    model: str | None = None
    """A directory or hub name of a Hugging Face causal LM with the policy's vocabulary, which gets a new scalar head;
    null: the start model."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW; the rate after warm-up."""
    warmup_steps: Natural = 0
    """The first so many steps train the critic alone."""
    clip: Annotated[float, Field(gt=0)] = 0.5
    """A value gains nothing by moving further than this in one step."""


class AlgorithmConfig(Config):
    """What is learnt from a batch: advantages, policy loss, corrections for samples of older policies, KL."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline", "gae"] = "grpo"
    """`grpo`: (r - mean) / std of the group. `dr_grpo`: r - mean. `rloo`: r - mean of the others.
    `reinforce_baseline`: r - mean of the group, then whitened over the batch (REINFORCE++ baseline). `gae`: PPO with a
    critic (section `critic`), token by token, whitened over the batch."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """`gae`: discount of a token's reward for each token before it."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """`gae`: 1: the response's whole return counts, as noisy as it is; 0: the critic's next value in its place."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """`ppo`: clipped token ratios. `gspo`: clipped sequence ratios. `cispo`: clipped weights on the log-probs."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """And above at 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """`ppo`: the loss of a token with negative advantage is at most this many times its advantage; null: no bound."""
    correction: Literal["auto"] | Correction = "auto"
    """For samples that another policy than the trainer's made. `behaviour`: the ratio of the policy loss is taken
    against the engine's own log-probs. The others take it against the trainer's log-probs before the update and weight
    by w = trainer's / engine's probability: `decoupled` by w, `tis_token` by min(w, correction_high), `tis_sequence`
    by the same of the whole response, `icepop` by w within [correction_low, correction_high] and 0 outside,
    `reject_sequence` by 1, without responses whose token ratios have a geometric mean outside. `none`: no correction.
    `auto`: `behaviour`."""
    correction_low: Annotated[float, Field(gt=0, le=1)] = 0.5
    """`icepop` and `reject_sequence`: smallest ratio that is trusted."""
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """Largest ratio that is trusted, or cap."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed"] = "token_mean"
    """Over the whole batch: the mean over tokens, the mean over responses of their token means, the mean over responses
    of their token sums, or the sum over tokens divided by responses x `fixed_length` (Dr. GRPO)."""
    fixed_length: Positive | None = None
    """`fixed`: tokens; null: generation.max_new_tokens."""
    kl: Literal["none", "loss", "reward"] = "none"
    """KL divergence from the start model: none, a term of the loss, or taken off the rewards: of each token with
    `gae`, of the whole response otherwise."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """In the loss. k2: half the squared log ratio, k3: low-variance (Schulman 2020). In the reward it is k1, the log
    ratio itself, whose gradient would vanish in the loss."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term."""
    reference: Literal["copy", "offload"] = "copy"
    """With `kl`: the frozen start model stays beside the policy, or in CPU memory between two batches."""
    overlong_buffer: Natural = 0
    """DAPO: the last so many tokens of the response budget cost up to `overlong_penalty`; 0: none."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Taken off the reward of a response of full length, in proportion within the buffer."""
    mismatch_alarm: Annotated[float, Field(gt=0)] = 0.05
    """Mean absolute difference of engine and trainer log-probs, on tokens of the version that trains, above which the
    run warns."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a mixture of experts' load-balancing loss, off by default as in the models' own configurations: of each
    response's sequence on its own (prompt too), so that it is exact under any packing; aggregated like the loss of its
    response tokens. 0.001 is what most models were pretrained with."""

    @property
    def active_correction(self) -> Correction:
        """The one that `auto` means, or the one asked for."""
        return "behaviour" if self.correction == "auto" else self.correction
