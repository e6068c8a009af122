"""What several answers to one prompt say. Pure: numbers in, numbers out.

Invariant: a response is *right* if its reward reaches `RIGHT`; shaped rewards count as themselves in the mean only.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

RIGHT = 1.0


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Chance that at least one of k answers drawn from these n is right, without bias: 1 - C(n - c, k) / C(n, k) with c
    right ones (Chen et al. 2021, equation 1). Raises `ValueError` unless 1 <= k <= n."""
    n, right = len(rewards), sum(reward >= RIGHT for reward in rewards)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} answers is not defined")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """maj@n: the mean reward of the answer that most responses give; of answers that are equally frequent, the mean, as
    a fair draw between them would have. A response without an answer ("") has no vote; without votes it is 0."""
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer:
            votes[answer].append(reward)
    most = max(map(len, votes.values()), default=0)
    first = [math.fsum(own) / len(own) for own in votes.values() if len(own) == most]
    return math.fsum(first) / len(first) if first else 0.0


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4 ... up to n, and n itself: the k of pass@k."""
    found = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return found if found[-1] == n else [*found, n]
