"""Telecom family `alarm`: which element's fault explains an alarm.

Invariants:
- The network is a tree fed from `CORE`, which never has an alarm. A faulty element raises one, and so does all that it
  feeds, except elements with a protected path: they stay clear, and so cut a chain of alarms.
- The root cause of an alarm is the last element met on the way up to `CORE` before the first one that is clear.
- Difficulty 1: 5 to 8 elements named N1 to N8; 2: 9 to 14 with the names of real kinds; 3: 15 to 24.
"""

import random

from forebay.data.question import Question, answered

_SIZES = {1: (5, 8), 2: (9, 14), 3: (15, 24)}
_KINDS = ("RTR", "OLT", "AGG", "DWDM", "MSAN", "BBU", "SW", "MW")
CORE = "CORE"
_EASY = tuple(f"N{number}" for number in range(1, 9))
_ASK = "The alarm on "
_END = " is examined. Which element is its root cause?"
_RULE = (
    "An element in alarm is the root cause of its own alarm if the element that feeds it is clear; "
    "else both have the same root cause. "
)


def draw_alarm(rng: random.Random, difficulty: int) -> Question:
    """A tree, up to three faults, and one of the alarms; the answer is an element's name."""
    count = rng.randint(*_SIZES[difficulty])
    names = rng.sample(_EASY, count) if difficulty == 1 else _real_names(rng, count)
    fed_by = {name: names[rng.randrange(max(0, at - 2), at)] if at else CORE for at, name in enumerate(names)}
    protected = set(rng.sample(names[1:], max(1, count // 6)))
    alarms = _spread(names, fed_by, set(rng.sample(names[: max(2, count // 2)], 1 + count // 8)), protected)
    deep = [name for name in alarms if fed_by[name] in alarms] or sorted(alarms)
    asked = rng.choice(sorted(deep) if rng.random() < 0.85 else sorted(alarms))
    chain = [asked]
    while fed_by[chain[-1]] in alarms:
        chain.append(fed_by[chain[-1]])
    top = fed_by[chain[-1]]
    edges = [f"{name} is fed by {feeder}; " for name, feeder in fed_by.items()]
    shown = [f"{name} is in alarm; " if name in alarms else f"{name} is clear; " for name in names]
    rng.shuffle(edges)
    rng.shuffle(shown)
    prompt = f"{_RULE}{''.join(edges)}CORE is clear; {''.join(shown)}{_ASK}{asked}{_END}"
    steps = [f"{name} is in alarm; " for name in chain]
    return Question(
        prompt,
        chain[-1],
        "math",
        ("family:alarm", f"difficulty:{difficulty}"),
        answered(f"{''.join(steps)}{top} is clear; ", chain[-1]),
        answered("".join(steps[:2]), chain[:2][-1]),
    )


def easy_words() -> list[str]:
    """Every piece of a prompt or solution of difficulty 1."""
    feeders = (*_EASY, CORE)
    edges = [f"{name} is fed by {feeder}; " for name in _EASY for feeder in feeders if name != feeder]
    states = [f"{name} is {state}; " for name in feeders for state in ("in alarm", "clear")]
    return [_RULE, *edges, *states, _ASK, _END, *_EASY]


def _real_names(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.choice(_KINDS)}{number}" for number in rng.sample(range(1, 100), count)]


def _spread(names: list[str], fed_by: dict[str, str], faults: set[str], protected: set[str]) -> set[str]:
    """The elements in alarm; `names` has feeders before what they feed."""
    alarms: set[str] = set()
    for name in names:
        if name in faults or (fed_by[name] in alarms and name not in protected):
            alarms.add(name)
    return alarms
