"""What is simulated, as plain data: engines, trainer, prompts with their true lengths, and the rules of a run.

Invariants:
- Seconds and tokens everywhere. Nothing here draws on a clock or knows of a controller.
- A `Scenario` that exists can be simulated: what cannot is refused with one line when it is made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from forebay.config.sections import AssumedLengthsConfig
from forebay.control.rules import Rules
from forebay.errors import UserError
from forebay.lengths.assumed import draw


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Continuous batching: one decode step with N active responses and K resident KV tokens takes a + b N + c K seconds
    and gives each of them one token."""

    a: float
    b: float
    c: float
    slots: int
    """Responses decoded at a time."""
    kv_tokens: float = math.inf
    """KV capacity; when it overflows, the youngest response is preempted, and computed again when it comes back."""
    prefill_s: float = 0.0
    """For each prompt token (a prompt once for all responses of its group) and each token that is computed again; the
    engine decodes nothing meanwhile."""
    pause_s: float = 0.0
    """For one weight refresh."""
    padded: bool = False
    """Static batches: a minibatch decodes until its longest response is done, every finished response keeps its slot
    and grows on (used with `Rules.minibatch_barrier`)."""

    def __post_init__(self) -> None:
        _require_finite(self, "engine", allowed=("kv_tokens",))
        if self.slots < 1:
            raise UserError(f"simulation: an engine with {self.slots} slots decodes nothing: give it 1 or more")
        if self.a + self.b + self.c <= 0:
            raise UserError("simulation: a decode step would take no time: give the engine a, b or c above 0")


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """A step takes fixed_s + per_token_s x (prompt and response tokens trained)."""

    fixed_s: float
    per_token_s: float
    publish_s: float = 0.0
    """After a step whose weights are published, before the next one."""
    share_streamed: float = 1.0
    """Of the work per token, what a streaming trainer does as groups arrive; the rest follows the last of them."""

    def __post_init__(self) -> None:
        _require_finite(self, "trainer")
        if self.share_streamed > 1:
            raise UserError(f"simulation: trainer share_streamed is {self.share_streamed:g}; it is a share, 0 to 1")


@dataclass(frozen=True)
class Workload:
    """Arrays over P prompts with n responses each."""

    lengths: NDArray[np.int32]
    """[P, n] true response lengths, 1 or more."""
    predicted: NDArray[np.float64]
    """[P] predicted mean length."""
    prompt_tokens: NDArray[np.int32]
    """[P]."""

    def __post_init__(self) -> None:
        if self.lengths.ndim != 2 or not self.lengths.size:
            raise UserError("simulation: the workload is empty: there is nothing to simulate")
        count = self.lengths.shape[0]
        if self.predicted.shape != (count,) or self.prompt_tokens.shape != (count,):
            raise UserError(
                f"simulation: {count} prompts have lengths, but {self.predicted.size} a prediction and "
                f"{self.prompt_tokens.size} a number of prompt tokens"
            )
        if not np.all(np.isfinite(self.predicted)) or np.any(self.predicted <= 0):
            worst = int(np.argmax(~np.isfinite(self.predicted) | (self.predicted <= 0)))
            raise UserError(
                f"simulation: prompt {worst} has the predicted length {self.predicted[worst]}: it must be finite "
                "and above 0"
            )
        if np.any(self.lengths < 1) or np.any(self.prompt_tokens < 0):
            raise UserError("simulation: a response must have 1 token or more, a prompt no less than 0")

    @property
    def longest(self) -> int:
        """Prompt and response tokens of the longest response."""
        return int((self.lengths.max(axis=1) + self.prompt_tokens).max())


@dataclass(frozen=True)
class Scenario:
    """One run to simulate."""

    rules: Rules
    streaming: bool
    engines: int
    engine: EngineModel
    trainer: TrainerModel
    workload: Workload
    order: list[list[list[int]]]
    """Batch groups of minibatches of prompt indices; epoch after epoch, as in a run."""
    sorted_steps: int | None = None
    """Prompts of each step, if they come one by one and the longest first."""
    seed: int = 0
    """Of the order of later epochs and of which groups teach."""
    reward_s: float = 0.0
    """For one group's rewards."""
    refresh_s: float = 0.0
    """Of one engine, from the begin of its refresh to the swap; it decodes on."""
    first_wave_s: float = 0.0
    """The first groups are let out evenly over so many seconds."""
    group_deadline_s: float | None = None
    """A group that is generated for longer is given up and made afresh."""
    warm_up: int = 10
    """Steps left out of the statistics."""
    teaching: float = 1.0
    """Share of the groups whose rewards differ."""

    def __post_init__(self) -> None:
        _require_finite(self, "scenario", only=("reward_s", "refresh_s", "first_wave_s", "teaching"))
        if self.engines < 1:
            raise UserError(f"simulation: {self.engines} engines generate nothing: give 1 or more")
        if self.rules.group_size != self.workload.lengths.shape[1]:
            raise UserError(
                f"simulation: groups have {self.rules.group_size} responses, but the workload has lengths of "
                f"{self.workload.lengths.shape[1]} for each prompt"
            )
        if self.workload.longest > self.engine.kv_tokens:
            raise UserError(
                f"simulation: the longest response needs {self.workload.longest:,} KV tokens, an engine has "
                f"{self.engine.kv_tokens:,.0f}: it would never fit; raise kv_tokens or shorten responses"
            )
        if self.rules.steps < self.warm_up + 2:
            raise UserError(
                f"simulation: {self.rules.steps} steps leave fewer than two to look at after the first {self.warm_up}: "
                f"simulate {self.warm_up + 2} or more"
            )
        if not 0 < self.teaching <= 1:
            raise UserError(
                f"simulation: a share of {self.teaching:g} of the groups teaches; give one above 0, up to 1"
            )
        self._check_order()

    def _check_order(self) -> None:
        places = [place for group in self.order for minibatch in group for place in minibatch]
        if not places:
            raise UserError("simulation: the order names no prompt: there is nothing to simulate")
        count = self.workload.lengths.shape[0]
        if min(places) < 0 or max(places) >= count:
            raise UserError(
                f"simulation: the order names the prompts {min(places)} to {max(places)}, the workload has {count}"
            )


def lognormal(prompts: int, group_size: int, assumed: AssumedLengthsConfig, longest: int, seed: int) -> Workload:
    """Assumed lengths (`forebay.lengths.assumed`), each response at most `longest` tokens."""
    if prompts < 1:
        raise UserError("simulation: no prompts: there is nothing to simulate")
    drawn = draw(prompts, group_size, assumed, longest, seed)
    return Workload(drawn.lengths, drawn.predicted, drawn.prompt_tokens)


def _require_finite(values: object, what: str, allowed: Sequence[str] = (), only: Sequence[str] | None = None) -> None:
    """Every number of a dataclass is finite and not negative; those in `allowed` may be infinite."""
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if only is not None and field.name not in only:
            continue
        if math.isnan(value) or value < 0 or (math.isinf(value) and field.name not in allowed):
            raise UserError(f"simulation: {what} {field.name} is {value}: give a number from 0 on")
