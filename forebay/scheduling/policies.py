"""The order in which prompts are generated, by policy: every prompt exactly once, in batch groups of minibatches.

Every policy starts from the same random order of the prompts (by seed) and moves prompts only as far as it must:
- `fifo`: the random order, cut.
- `longest_first`: blocks of `batch_groups` prompts (one optimizer step), the longest of each first, one by one. A block
  is a batch group. Where an epoch ends within a step, the step is filled up from the next epoch before it is sorted.
- `balanced`: within blocks of `window` prompts, minibatches of equal load that mix long and short.
- `asp`: the prompts sorted by length, cut into minibatches of like length, those in balanced batch groups of random
  order (the Adaptive Scheduling Pipeline, steps 2 and 3). Prompts of equal length stay in random order.

Indices stand for prompts here; nothing knows ids or files.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.config import ScheduleConfig
from forebay.config.run import Mode
from forebay.scheduling.batch_groups import balance
from forebay.scheduling.minibatches import partition

Policy = Literal["fifo", "asp", "balanced", "longest_first"]
Vector = NDArray[np.float64]
Indices = NDArray[np.int64]
Tokens = NDArray[np.integer[Any]] | NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """Prompts in order, cut into minibatches, those into batch groups."""

    prompts: Indices
    """[P] indices."""
    minibatches: Indices
    """[M] prompts in each."""
    batch_groups: Indices
    """[G] minibatches in each."""

    @property
    def group_prompts(self) -> Indices:
        """[G] prompts in each batch group."""
        return sums(self.minibatches, self.batch_groups)

    def nested(self) -> list[list[list[int]]]:
        """Batch groups of minibatches of indices."""
        prompts, sizes = iter(self.prompts.tolist()), iter(self.minibatches.tolist())
        return [
            [[next(prompts) for _ in range(next(sizes))] for _ in range(minibatches)]
            for minibatches in self.batch_groups.tolist()
        ]


def resolve(policy: Literal["auto", "fifo", "asp", "balanced", "longest_first"], mode: Mode) -> Policy:
    """The policy that `auto` means: where all wait for a batch's last response, the longest go first; where the next
    batch is on its way or nobody waits, an even load is what helps (`docs/async.md` has the study)."""
    if policy != "auto":
        return policy
    return "longest_first" if mode == "sync" else "balanced"


def sorted_steps(config: ScheduleConfig, mode: Mode, batch_groups: int) -> int | None:
    """Prompts that are sorted among themselves because one training step takes them, in later epochs too
    (`forebay.control.source.scheduled`); None under policies whose order has nothing to do with steps."""
    return batch_groups if resolve(config.policy, mode) == "longest_first" else None


def order_prompts(
    predicted: Vector,
    prompt_tokens: Tokens | None,
    config: ScheduleConfig,
    mode: Mode,
    batch_groups: int,
    seed: int,
) -> list[list[list[int]]]:
    """Batch groups of minibatches of prompt indices; see `make_order`."""
    return make_order(predicted, prompt_tokens, config, mode, batch_groups, seed).nested()


def make_order(
    predicted: Vector,
    prompt_tokens: Tokens | None,
    config: ScheduleConfig,
    mode: Mode,
    batch_groups: int,
    seed: int,
) -> Order:
    """Order P prompts.

    Args:
        predicted: [P] response lengths in tokens, finite and positive.
        prompt_tokens: [P]; only `config.load` kv_area asks for it.
        batch_groups: Prompts in one optimizer step.
    """
    predicted = np.asarray(predicted, dtype=np.float64)
    if not np.all(np.isfinite(predicted)) or np.any(predicted <= 0):
        raise ValueError("predicted lengths must be finite and positive")
    rng = np.random.default_rng(seed)
    drawn = rng.permutation(predicted.size)
    match resolve(config.policy, mode):
        case "fifo":
            minibatches = _cut(drawn.size, config.minibatch_prompts)
            return Order(drawn, minibatches, _cut(minibatches.size, config.period_minibatches))
        case "longest_first":
            return _longest_first(predicted, drawn, batch_groups)
        case "balanced":
            return _balanced(load(predicted, prompt_tokens, config), drawn, config, rng)
        case "asp":
            return _asp(predicted, load(predicted, prompt_tokens, config), drawn, config, rng)


def load(predicted: Vector, prompt_tokens: Tokens | None, config: ScheduleConfig) -> Vector:
    """[P] what each prompt weighs: its predicted tokens, or the area of its KV cache over the time of its decoding
    (token after token on top of the prompt: p l + l^2 / 2)."""
    if config.load == "tokens":
        return predicted
    if prompt_tokens is None:
        raise ValueError("the KV area of a prompt needs its number of tokens")
    return predicted * np.asarray(prompt_tokens, dtype=np.float64) + predicted**2 / 2


def sums(values: NDArray[np.generic], sizes: Indices) -> NDArray:  # type: ignore[type-arg]
    """Sums of consecutive parts of `values`; every size is at least 1."""
    return np.add.reduceat(values, np.cumsum(sizes) - sizes) if sizes.size else values[:0]  # type: ignore[arg-type]


def _cut(count: int, size: int) -> Indices:
    """Parts of `size`, the last one smaller if need be."""
    whole, rest = divmod(count, size)
    return np.array([size] * whole + [rest] * (rest > 0), dtype=np.int64)


def _longest_first(predicted: Vector, drawn: Indices, batch_groups: int) -> Order:
    order = np.lexsort((-predicted[drawn], np.arange(drawn.size) // batch_groups))
    # One prompt at a time, each to the engine with the least to do: longest processing time first.
    blocks = [_cut(block, 1) for block in _cut(drawn.size, batch_groups).tolist()]
    return Order(drawn[order], _joined(blocks), np.array([block.size for block in blocks], dtype=np.int64))


def _balanced(loads: Vector, drawn: Indices, config: ScheduleConfig, rng: np.random.Generator) -> Order:
    prompts, minibatches = [], []
    for start in range(0, drawn.size, config.window):
        window = drawn[start : start + config.window]
        unit = balance(loads[window], config.minibatch_prompts, config.grouping)
        unit = rng.permutation(int(unit.max()) + 1)[unit]  # else the longest prompts' units would come first
        prompts.append(window[np.lexsort((-loads[window], unit))])
        minibatches.append(np.bincount(unit))
    sizes = _joined(minibatches)
    return Order(_joined(prompts), sizes, _cut(sizes.size, config.period_minibatches))


def _asp(predicted: Vector, loads: Vector, drawn: Indices, config: ScheduleConfig, rng: np.random.Generator) -> Order:
    ranked = drawn[np.argsort(predicted[drawn], kind="stable")]
    sizes = partition(predicted[ranked], config.minibatch_prompts, config.minibatch_slack, config.objective)
    group = balance(sums(loads[ranked], sizes), config.period_minibatches, config.grouping)
    if not group.size:
        return Order(ranked, sizes, group)
    # Groups in random order and minibatches mixed within each: no stretch of the run has only short or long ones.
    group = rng.permutation(int(group.max()) + 1)[group]
    order = np.lexsort((rng.permutation(sizes.size), group))
    starts = np.cumsum(sizes) - sizes
    placed = sizes[order]
    moved = np.repeat(starts[order] - (np.cumsum(placed) - placed), placed) + np.arange(ranked.size)
    return Order(ranked[moved], placed, np.bincount(group))


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
