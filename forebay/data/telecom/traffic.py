"""Telecom families `erlang_b` and `erlang_c`: sizing of channels and of agents.

Invariants:
- Probabilities come from one recursion, which is stable for any number of servers.
- A question for the smallest number of servers is drawn so that no neighbour's value is within a thousandth of the
  target: rounding decides nothing.
"""

import math
import random

from forebay.data.question import Question, answered, quantity

_LARGEST = {1: 12, 2: 60, 3: 150}
"""Difficulty -> highest offered traffic in erlang."""
_CLEAR = 1e-3


def blocking(erlang: float, servers: int) -> float:
    """Erlang's first formula, B = (A^N / N!) / sum_k (A^k / k!), by B(0) = 1, B(n) = A B(n-1) / (n + A B(n-1))
    (ITU-T E.501; Erlang 1917)."""
    probability = 1.0
    for server in range(1, servers + 1):
        probability = erlang * probability / (server + erlang * probability)
    return probability


def waiting(erlang: float, servers: int) -> float:
    """Erlang's second formula: the probability to wait, C = N B / (N - A (1 - B)); 1 if there are too few servers."""
    if servers <= erlang:
        return 1.0
    lost = blocking(erlang, servers)
    return servers * lost / (servers - erlang * (1 - lost))


def late(erlang: float, servers: int, seconds: float, holding_s: float) -> float:
    """Probability to wait longer: C exp(-(N - A) t / h) (M/M/N, first come first served)."""
    return waiting(erlang, servers) * math.exp(-max(0.0, servers - erlang) * seconds / holding_s)


def draw_erlang_b(rng: random.Random, difficulty: int) -> Question:
    """1: channels for a blocking target; 2: the blocking of a given group; 3: channels, traffic from calls per hour."""
    tags = ("family:erlang_b", f"difficulty:{difficulty}")
    if difficulty == 2:
        erlang, servers = rng.randint(20, 10 * _LARGEST[2]) / 10, rng.randint(3, 70)
        percent = 100 * blocking(erlang, servers)
        if not 0.05 <= percent <= 60:
            return draw_erlang_b(rng, difficulty)
        prompt = (
            f"A trunk group of {servers} channels is offered {erlang:g} erlang (Poisson arrivals, blocked calls are "
            "lost). What is the blocking probability by Erlang B, in %, within 0.05 %?"
        )
        return Question(
            prompt,
            quantity(round(percent, 4), "%", 0.05),
            "numeric",
            tags,
            answered(_trace(erlang, servers), f"{percent:.2f} %"),
        )
    if difficulty == 1:
        erlang = rng.randint(2, 10 * _LARGEST[1]) / 10
        offered = f"{erlang:g} erlang"
    else:
        holding, calls = rng.choice((60, 90, 120, 150, 180, 240)), rng.randint(20, 240) * 10
        erlang = calls * holding / 3600
        offered = f"{calls} calls per hour with a mean holding time of {holding} s"
        if not 1 <= erlang <= _LARGEST[3]:
            return draw_erlang_b(rng, difficulty)
    target = rng.choice((0.005, 0.01, 0.02, 0.05, 0.1))
    servers = 1
    while blocking(erlang, servers) > target:
        servers += 1
    if not _clear(target, blocking(erlang, servers), blocking(erlang, servers - 1)):
        return draw_erlang_b(rng, difficulty)
    prompt = (
        f"A trunk group is offered {offered} (Poisson arrivals, blocked calls are lost). How many channels are needed, "
        f"at least, so that the blocking probability by Erlang B is at most {100 * target:g} %? Give the number."
    )
    return Question(prompt, servers, "numeric", tags, answered(_trace(erlang, servers), servers))


def draw_erlang_c(rng: random.Random, difficulty: int) -> Question:
    """1: the probability to wait; 2: the mean wait; 3: agents for a service level."""
    tags = ("family:erlang_c", f"difficulty:{difficulty}")
    holding = rng.choice((60, 90, 120, 180, 240, 300))
    calls = rng.randint(2, 60) * 10
    erlang = calls * holding / 3600
    if not 0.5 <= erlang <= _LARGEST[difficulty]:
        return draw_erlang_c(rng, difficulty)
    servers = math.floor(erlang) + rng.randint(1, 4)
    centre = (
        f"A service desk receives {calls} calls per hour (Poisson), handling times are exponential with mean {holding} "
        "s; callers wait without limit"
    )
    wait = waiting(erlang, servers)
    work = f"A = {erlang:.4f} erlang, B = {blocking(erlang, servers):.5f}, C = {wait:.5f}"
    if difficulty == 1:
        percent = 100 * wait
        prompt = f"{centre}; it has {servers} agents. By Erlang C, what share of callers must wait, in %, within 0.1 %?"
        return Question(
            prompt, quantity(round(percent, 4), "%", 0.1), "numeric", tags, answered(work, f"{percent:.2f} %")
        )
    if difficulty == 2:
        seconds = wait * holding / (servers - erlang)
        prompt = (
            f"{centre}; it has {servers} agents. By Erlang C, what is the mean wait over "
            "all callers, in s, within 0.5 %?"
        )
        return Question(
            prompt, quantity(round(seconds, 6), "s", 0.0, 0.005), "numeric", tags, answered(work, f"{seconds:.4f} s")
        )
    limit, level = rng.choice((10, 15, 20, 30)), rng.choice((0.7, 0.8, 0.9, 0.95))
    servers = math.floor(erlang) + 1
    while late(erlang, servers, limit, holding) > 1 - level:
        servers += 1
    before = late(erlang, servers - 1, limit, holding)
    if not _clear(1 - level, late(erlang, servers, limit, holding), before):
        return draw_erlang_c(rng, difficulty)
    prompt = (
        f"{centre}. By Erlang C, how many agents are needed, at least, so that at least "
        f"{100 * level:g} % of callers wait {limit} s or less? Give the number."
    )
    return Question(prompt, servers, "numeric", tags, answered(f"A = {erlang:.4f} erlang", servers))


def _clear(target: float, *values: float) -> bool:
    return all(abs(value - target) > _CLEAR * target for value in values)


def _trace(erlang: float, servers: int) -> str:
    last = range(max(0, servers - 3), servers + 1)
    return "; ".join(f"B({number}) = {blocking(erlang, number):.5f}" for number in last)
