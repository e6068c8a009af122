"""Telecom family `timer`: radio link failure.

Invariants:
- TS 38.331, 5.3.10: N310 consecutive out-of-sync indications start T310; N311 consecutive in-sync indications while it
  runs stop it; its expiry is the radio link failure. Counters are set back by an indication of the other kind, and by
  the start and stop of T310.
- An indication at the very time of the expiry comes too late (the question says so).
"""

import random
from itertools import groupby

from forebay.data.question import Question, answered, quantity

_RUNS = {1: (1, 2), 2: (3, 5), 3: (6, 10)}


def draw_timer(rng: random.Random, difficulty: int) -> Question:
    """1: one or two runs of indications; 2: three to five; 3: six to ten."""
    n310, n311 = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 3, 4))
    t310, period = rng.choice((50, 100, 200, 500, 1000)), rng.choice((10, 20, 40))
    runs = rng.randint(*_RUNS[difficulty])
    indications = "".join(
        ("out " if run % 2 == 0 else "in ") * rng.randint(1, 8 if run % 2 == 0 else 5) for run in range(runs)
    ).split()
    indications += ["out"] * (rng.randint(n310, n310 + t310 // period + 3) if rng.random() < 0.8 else 0)
    failed = failure_ms(indications, n310, n311, t310, period)
    listed = ", ".join(
        f"{len(list(run))} {kind}-of-sync" if kind == "out" else f"{len(list(run))} in-sync"
        for kind, run in groupby(indications)
    )
    prompt = (
        f"N310 = {n310}, N311 = {n311}, T310 = {t310} ms. A device gives one indication every {period} ms, the first "
        f"at {period} ms: {listed}; then none. An indication at the very time at which T310 expires is too late. By TS "
        "38.331, 5.3.10, when does it detect radio link failure, in ms? Give 0 ms if it does not."
    )
    tags = ("family:timer", f"difficulty:{difficulty}")
    return Question(prompt, quantity(failed, "ms"), "numeric", tags, answered("", f"{failed} ms"))


def failure_ms(indications: list[str], n310: int, n311: int, t310: int, period: int) -> int:
    """When T310 expires; 0 if it never does. It goes on to run after the last indication."""
    expires, row, before = 0, 0, ""
    for number, kind in enumerate(indications, 1):
        now = number * period
        if expires and now >= expires:
            return expires
        row = row + 1 if kind == before else 1
        before = kind
        if not expires and kind == "out" and row == n310:
            expires, before = now + t310, ""
        elif expires and kind == "in" and row == n311:
            expires, before = 0, ""
    return expires
