"""Sequences -> packed micro-batches, the same number on every rank.

Invariants:
- Every sequence lies in exactly one micro-batch of one rank; no micro-batch is over the token budget.
- Every rank has the same number of micro-batches: under ZeRO-2 and 3 each backward pass is a collective, and a rank
  with one fewer hangs all the others. Where a rank runs out it gets a padding micro-batch whose weights are zero.
- The plan is a pure function of the lengths, so each rank computes all of it and nothing has to be agreed on.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.errors import RunError
from forebay.training.vision import BLANK, ImageBatch, Pictures, lay_out

Balance = Literal["longest_first", "karmarkar_karp"]
PerToken = float | Sequence[float] | NDArray[np.floating]
"""One number for all response tokens of a sequence, or one for each."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One prompt and response. `behaviour` has one log-probability for each response token."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    behaviour: Sequence[float]
    advantage: PerToken
    current: bool
    """All its tokens come from the very weights that the trainer has: their log-probabilities must equal its own."""
    proximal: PerToken = 0.0
    """Log-probabilities under the trainer before its step; only if the step has several updates."""
    values: PerToken = 0.0
    """The critic's, before the step, of the state before each token."""
    returns: PerToken = 0.0
    """What the critic is to learn."""
    images: Sequence[str] = ()
    """Names of the prompt's images, in order."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


PADDING = TrainSequence(prompt_ids=(0,), ids=(0,), behaviour=(0.0,), advantage=0.0, current=False)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T packed tokens, R of them (the response tokens) predicted. Positions restart at each of the S sequences."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64; (3, 1, T) of a model with a vision tower (`vision.rope_positions`)."""
    starts: Tensor
    """(S + 1,) int32: cumulative sequence lengths from 0 to T."""
    longest: int
    """Tokens of the longest sequence."""
    sources: Tensor
    """(R,) int64: index in T of the token before each response token."""
    targets: Tensor
    """(R,) int64: the response tokens."""
    sequence: Tensor
    """(R,) int64: the sequence that each response token is of, from 0 to S - 1, ascending."""
    behaviour: Tensor
    """(R,) float32: log-probabilities under the policy that sampled them."""
    advantages: Tensor
    """(R,) float32."""
    proximal: Tensor
    """(R,) float32: log-probabilities under the trainer before its step, if they are known."""
    values: Tensor
    """(R,) float32."""
    returns: Tensor
    """(R,) float32."""
    weights: Tensor
    """(R,) float32: 1, or 0 in a padding sequence."""
    current: Tensor
    """(R,) bool: sampled by the version that trains."""
    images: ImageBatch | None = None
    """Of a model with a vision tower, always."""

    def to(self, device: torch.device) -> "MicroBatch":
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if hasattr(part, "to")})


def plan_micro_batches(
    lengths: Sequence[int], ranks: int, budget: int, balance: Balance = "karmarkar_karp"
) -> list[list[list[int]]]:
    """plan[rank][micro-batch] = indices into `lengths`; an empty list stands for a padding micro-batch.

    Ranks are balanced by tokens. Raises `RunError` if one sequence is longer than `budget`.
    """
    if lengths and max(lengths) > budget:
        raise RunError(
            f"a sequence has {max(lengths)} tokens but training.micro_batch_tokens is {budget}: raise it or lower "
            "model.max_model_len"
        )
    share_out = _longest_first if balance == "longest_first" else _differencing
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan = [_first_fit(share, lengths, budget) for share in share_out(order, lengths, ranks)]
    most = max(len(bins) for bins in plan)
    return [bins + [[] for _ in range(most - len(bins))] for bins in plan]


def _longest_first(order: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Each to the least loaded rank (LPT; at most 4/3 - 1/(3 ranks) of the least possible maximum: R. Graham, Bounds
    on multiprocessing timing anomalies, 1969)."""
    loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for i in order:
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += lengths[i]
    return shares


def _differencing(order: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Largest differencing (N. Karmarkar and R. Karp, The differencing method of set partitioning, 1982): of all
    partial ways to share out, at first one for each sequence, join the two that are most uneven, the heaviest share of
    one with the lightest of the other. Within LPT's bound (W. Michiels, J. Korst and E. Aarts, Performance ratios for
    the Karmarkar-Karp differencing method, 2003), and mostly far nearer to even."""
    if not order:
        return [[] for _ in range(ranks)]
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(ranks - 1)]
    # (minus the spread, a number that makes it unique, [(load, sequences)] by falling load)
    heap = [(-lengths[i], place, [(lengths[i], [i]), *empty]) for place, i in enumerate(order)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, place, one = heapq.heappop(heap)
        _, _, other = heap[0]
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted(((a + b, some + more) for (a, some), (b, more) in pairs), key=lambda share: -share[0])
        heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], place, joined))
    return [share for _, share in heap[0][2]]


def _first_fit(share: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit by falling length (within 11/9 of the fewest bins)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(share, key=lambda i: (-lengths[i], i)):
        k = next((k for k, free in enumerate(room) if free >= lengths[i]), len(bins))
        if k == len(bins):
            bins.append([])
            room.append(budget)
        bins[k].append(i)
        room[k] -= lengths[i]
    return bins


def pack(sequences: Sequence[TrainSequence], pictures: Pictures | None = None) -> MicroBatch:
    """Lay the sequences end to end; none at all gives a padding micro-batch. `pictures`: of a model with a vision
    tower; where no sequence has an image, one of two tokens with a blank image is added, of weight 0."""
    weighs = [1.0] * len(sequences)
    if pictures is not None and not any(s.images for s in sequences):
        sequences = [*sequences, replace(PADDING, prompt_ids=(pictures.vision.token,), images=(BLANK,))]
    elif not sequences:
        sequences = [PADDING]
    weighs += [0.0] * (len(sequences) - len(weighs))
    lengths = np.array([len(s) for s in sequences])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    answers = np.array([len(s.ids) for s in sequences])
    prompts = lengths - answers
    # Response token j of a sequence is predicted at prompt_length - 1 + j, one before its own place.
    within = np.arange(answers.sum()) - np.repeat(np.cumsum(answers) - answers, answers)
    positions, images = torch.from_numpy(np.arange(starts[-1]) - np.repeat(starts[:-1], lengths))[None], None
    if pictures is not None:
        positions, images = lay_out(sequences, starts, pictures)

    def floats(numbers: Sequence[PerToken]) -> Tensor:
        pairs = zip(numbers, answers, strict=True)
        return torch.from_numpy(np.concatenate([np.broadcast_to(np.asarray(x, np.float32), n) for x, n in pairs]))

    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([[*s.prompt_ids, *s.ids] for s in sequences]).astype(np.int64))[None],
        position_ids=positions,
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=int(lengths.max()),
        sources=torch.from_numpy(np.repeat(starts[:-1] + prompts - 1, answers) + within),
        targets=torch.from_numpy(np.concatenate([s.ids for s in sequences]).astype(np.int64)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(sequences)), answers)),
        behaviour=floats([s.behaviour for s in sequences]),
        advantages=floats([s.advantage for s in sequences]),
        proximal=floats([s.proximal for s in sequences]),
        values=floats([s.values for s in sequences]),
        returns=floats([s.returns for s in sequences]),
        weights=torch.from_numpy(np.repeat(weighs, answers).astype(np.float32)),
        current=torch.from_numpy(np.repeat([s.current for s in sequences], answers)),
        images=images,
    )
