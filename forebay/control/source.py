"""The prompts in schedule order, epoch after epoch.

Invariants:
- Within an epoch every prompt comes exactly once. An epoch's end is not an end: the next one follows with its batch
  groups in another order, so a run never spins on an empty data set.
- A minibatch is overtaken by at most `WINDOW` others, however often short ones are preferred.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from forebay.control.types import Prompt

Minibatch = tuple[Prompt, ...]

WINDOW = 4
"""Minibatches looked at when the queue runs low."""


def scheduled(batch_groups: Sequence[Sequence[Minibatch]], seed: int, step: int | None = None) -> Iterator[Minibatch]:
    """Minibatches for ever; the first epoch in the given order, later ones with the batch groups shuffled.

    The order of batch groups is free: they carry equal load, or are a batch each, or are random to begin with. What is
    inside one stays together; unless `step` says how many prompts a training step takes, one by one and the longest
    first: then that is what every `step` of them are, also where an epoch ends within a step.
    """
    if not any(any(minibatch for minibatch in group) for group in batch_groups):
        raise ValueError("the schedule is empty")
    rng = random.Random(seed)
    if step is not None:
        yield from _longest_first(_one_by_one(batch_groups, rng), step)
    order = list(range(len(batch_groups)))
    while True:
        for index in order:
            yield from (tuple(minibatch) for minibatch in batch_groups[index] if minibatch)
        rng.shuffle(order)


def _one_by_one(batch_groups: Sequence[Sequence[Minibatch]], rng: random.Random) -> Iterator[Prompt]:
    """Prompts for ever; in later epochs also mixed within the batch groups, so that a part of one is like the whole."""
    order = list(range(len(batch_groups)))
    for epoch in count():
        for index in order:
            prompts = [prompt for minibatch in batch_groups[index] for prompt in minibatch]
            if epoch:
                rng.shuffle(prompts)
            yield from prompts
        rng.shuffle(order)


def _longest_first(prompts: Iterator[Prompt], step: int) -> Iterator[Minibatch]:
    """A step that two epochs share has no prompt twice, if there are enough: its second turn is the next step's."""
    put_off: deque[Prompt] = deque()
    while True:
        block: list[Prompt] = []
        twice: list[Prompt] = []
        ids: set[str] = set()
        while len(block) < step:
            prompt = put_off.popleft() if put_off else next(prompts)
            if prompt.prompt_id in ids and len(twice) < step:
                twice.append(prompt)
            else:
                block.append(prompt)
                ids.add(prompt.prompt_id)
        put_off.extend(twice)
        for prompt in sorted(block, key=lambda prompt: -prompt.predicted_length):
            yield (prompt,)


class Intake:
    """Hands out prompts; a minibatch may be taken in parts, and its rest comes before any other."""

    def __init__(self, source: Iterator[Minibatch]) -> None:
        self._source = source
        self._current: deque[Prompt] = deque()
        self._ahead: deque[tuple[Minibatch, list[int]]] = deque()

    def peek(self, hurry: bool) -> Prompt:
        """The next prompt. `hurry`: if a new minibatch starts, let it be the one that finishes soonest."""
        if not self._current:
            self._current.extend(self._next(hurry))
        return self._current[0]

    def take(self) -> Prompt:
        """Remove and return the prompt that `peek` showed."""
        return self._current.popleft()

    @property
    def left_in_minibatch(self) -> int:
        return len(self._current)

    def _next(self, hurry: bool) -> Minibatch:
        while len(self._ahead) < WINDOW:
            self._ahead.append((next(self._source), [0]))
        chosen = 0
        if hurry and self._ahead[0][1][0] < WINDOW:
            chosen = min(range(WINDOW), key=lambda i: max(p.predicted_length for p in self._ahead[i][0]))
        for i in range(chosen):
            self._ahead[i][1][0] += 1
        minibatch = self._ahead[chosen][0]
        del self._ahead[chosen]
        return minibatch
