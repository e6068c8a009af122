"""The prompts in schedule order, epoch after epoch.

Invariant: within an epoch every prompt comes exactly once. An epoch's end is not an end: the next one follows with
its batch groups in another order, so a run never spins on an empty data set.
"""

import random
from collections.abc import Iterator, Sequence

from forebay.control.types import Prompt

Minibatch = tuple[Prompt, ...]


def scheduled(batch_groups: Sequence[Sequence[Minibatch]], seed: int) -> Iterator[Minibatch]:
    """Minibatches for ever; the first epoch in the given order, later ones with the batch groups shuffled.

    Batch groups carry equal predicted load, so their order is free; what is inside one stays together.
    """
    if not any(any(minibatch for minibatch in group) for group in batch_groups):
        raise ValueError("the schedule is empty")
    order = list(range(len(batch_groups)))
    rng = random.Random(seed)
    while True:
        for index in order:
            yield from (tuple(minibatch) for minibatch in batch_groups[index] if minibatch)
        rng.shuffle(order)
