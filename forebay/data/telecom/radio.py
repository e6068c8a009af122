"""Telecom families `link_budget` and `handover`.

Invariants:
- Level sums are exact in tenths of a decibel; a tolerance stands in the question wherever a logarithm is taken.
- Difficulty 1 uses few, small whole numbers, so that a model with a word for each of them can learn it.
"""

import math
import random

from forebay.data.question import Question, answered, quantity

_STAGES = range(1, 8)
_COUNTED = 3
"""Stages that the hasty solution counts."""
_LOWEST, _HIGHEST = 0, 20
_GAINS = [gain for gain in range(-4, 5) if gain]
_EASY_BUDGET = "In a distributed antenna system a signal passes these stages in turn. Source "
_EASY_END = "What is the level behind the last stage, in dBm?"

_PERIOD_MS = 40
_EASY_SAMPLES = range(1, 11)
_DIFFERENCES = range(-3, 9)
_A3 = f"Neighbour minus serving cell, measured every {_PERIOD_MS} ms (#1 after {_PERIOD_MS} ms): "
_A3_RULE = (
    "An event A3 report is sent at the first measurement that is the last of so many in a row above the threshold. "
    "When, in ms?"
)


def draw_link_budget(rng: random.Random, difficulty: int) -> Question:
    """1: a chain of gains and losses; 2: a radio link with a given path loss; 3: the path loss by formula."""
    return (_chain, _given_loss, _free_space)[difficulty - 1](rng)


def free_space_loss_db(megahertz: float, kilometres: float) -> float:
    """Basic free-space transmission loss: 32.44 + 20 log10(f / MHz) + 20 log10(d / km) (ITU-R P.525-4, eq. 4, which
    rounds the constant to 32.4)."""
    return 32.44 + 20 * math.log10(megahertz) + 20 * math.log10(kilometres)


def _chain(rng: random.Random) -> Question:
    stages = rng.randint(2, len(_STAGES))
    level = rng.randint(_LOWEST + 5, _HIGHEST - 5)
    prompt, levels = f"{_EASY_BUDGET}{level} dBm; ", [level]
    for stage in range(1, stages + 1):
        gain = rng.choice([gain for gain in _GAINS if _LOWEST <= levels[-1] + gain <= _HIGHEST])
        prompt += f"stage {stage} {gain:+d} dB; "
        levels.append(levels[-1] + gain)

    def work(end: int) -> str:
        steps = "".join(f"{stage}: {levels[stage]} dBm; " for stage in range(1, end + 1))
        return answered(steps, f"{levels[end]} dBm")

    tags = ("family:link_budget", "difficulty:1")
    answer = quantity(levels[-1], "dBm")
    return Question(prompt + _EASY_END, answer, "numeric", tags, work(stages), work(min(stages, _COUNTED)))


def _given_loss(rng: random.Random) -> Question:
    power, gains, losses, loss = _link(rng)
    path = rng.randint(800, 1400)
    level = power + sum(gains) - sum(losses) - path
    prompt = f"{_described(power, gains, losses)}; path loss {path / 10:.1f} dB; body loss {loss / 10:.1f} dB"
    level -= loss
    terms = " ".join(f"{term / 10:+.1f}" for term in (*gains, *(-one for one in losses), -path, -loss))
    return Question(
        f"{prompt}. What is the received power in dBm, to one decimal?",
        quantity(level / 10, "dBm", 0.05),
        "numeric",
        ("family:link_budget", "difficulty:2"),
        answered(f"{power / 10:.1f} {terms} = {level / 10:.1f}", f"{level / 10:.1f} dBm"),
    )


def _free_space(rng: random.Random) -> Question:
    power, gains, losses, margin = _link(rng)
    megahertz, kilometres = (
        rng.choice((700, 800, 1800, 2100, 2600, 3500, 3700, 7000, 18000, 26000)),
        rng.randint(2, 60) / 4,
    )
    needed = rng.randint(-1050, -700)
    level = (power + sum(gains) - sum(losses)) / 10 - free_space_loss_db(megahertz, kilometres)
    spare = level - margin / 10 - needed / 10
    prompt = (
        f"{_described(power, gains, losses)}; frequency {megahertz} MHz; distance {kilometres:g} km in free space "
        f"(L = 32.44 + 20 log10(f/MHz) + 20 log10(d/km)); fading margin {margin / 10:.1f} dB; receiver sensitivity "
        f"{needed / 10:.1f} dBm. By how many dB does the received power, less the fading margin, exceed the "
        "sensitivity (negative if it falls short)? Give dB, within 0.1 dB."
    )
    work = f"Path loss {free_space_loss_db(megahertz, kilometres):.2f} dB, received {level:.2f} dBm"
    return Question(
        prompt,
        quantity(round(spare, 4), "dB", 0.1),
        "numeric",
        ("family:link_budget", "difficulty:3"),
        answered(work, f"{spare:.2f} dB"),
    )


def _link(rng: random.Random) -> tuple[int, list[int], list[int], int]:
    """Power, two gains, two losses and one more loss, in tenths of dB(m)."""
    gains, losses = [rng.randint(20, 240), rng.randint(0, 180)], [rng.randint(2, 40), rng.randint(1, 30)]
    return rng.randint(200, 460), gains, losses, rng.randint(0, 120)


def _described(power: int, gains: list[int], losses: list[int]) -> str:
    return (
        f"Radio link: transmit power {power / 10:.1f} dBm; transmit antenna {gains[0] / 10:.1f} dBi; receive antenna "
        f"{gains[1] / 10:.1f} dBi; transmit feeder loss {losses[0] / 10:.1f} dB; receive feeder loss "
        f"{losses[1] / 10:.1f} dB"
    )


def draw_handover(rng: random.Random, difficulty: int) -> Question:
    """Event A3 of TS 38.331, 5.5.4.4: Mn + offsets - hysteresis > Mp + offset, held for the time to trigger.

    1: the threshold is given; 2: it follows from offset and hysteresis; 3: so does the number of measurements, from the
    time to trigger, and there is a cell individual offset.
    """
    if difficulty == 1:
        return _easy_handover(rng)
    offset, hysteresis, individual = rng.randint(1, 4), rng.randint(0, 4) / 2, 0
    period, run = rng.choice((40, 80, 120, 200)), rng.randint(2, 5)
    if difficulty == 3:
        individual = rng.choice((-3, -2, -1, 1, 2, 3))
    threshold = offset + hysteresis - individual
    samples = _samples(rng, range(-4, 12), threshold, run, 16 if difficulty == 2 else 24)
    at = report_at(samples, threshold, run)
    assert at is not None
    held = (
        f"that is the last of {run} in a row to fulfil it"
        if difficulty == 2
        else f"that fulfils it as all in the {(run - 1) * period} ms before do (time to trigger, both ends counted)"
    )
    cell = f", cell individual offset of the neighbour {individual:+d} dB"
    prompt = (
        f"Event A3 is fulfilled while neighbour + cell individual offset - hysteresis > serving + offset. Offset "
        f"{offset} dB, hysteresis {hysteresis:g} dB{cell}. Every {period} ms, first "
        f"after {period} ms, neighbour minus serving is measured, in dB: {', '.join(map(str, samples))}. The report is "
        f"sent with the first measurement {held}. After how many ms?"
    )
    work = f"Threshold {threshold:g} dB, measurement {at}"
    tags = ("family:handover", f"difficulty:{difficulty}")
    return Question(prompt, quantity(at * period, "ms"), "numeric", tags, answered(work, f"{at * period} ms"))


def report_at(samples: list[int], threshold: float, run: int) -> int | None:
    """Number (from 1) of the first sample that ends `run` samples in a row above the threshold."""
    row = 0
    for number, sample in enumerate(samples, 1):
        row = row + 1 if sample > threshold else 0
        if row == run:
            return number
    return None


def _easy_handover(rng: random.Random) -> Question:
    threshold, run = rng.randint(1, 4), rng.randint(2, 4)
    samples = _samples(rng, _DIFFERENCES, threshold, run, len(_EASY_SAMPLES))
    at = report_at(samples, threshold, run)
    assert at is not None
    listed = "".join(f"#{number} {sample:+d} dB; " for number, sample in enumerate(samples, 1))
    prompt = f"{_A3}{listed}threshold {threshold} dB; {run} in a row. {_A3_RULE}"
    tags = ("family:handover", "difficulty:1")
    answer = quantity(at * _PERIOD_MS, "ms")
    return Question(
        prompt, answer, "numeric", tags, _counted(samples, threshold, run, 1), _counted(samples, threshold, run, 0)
    )


def _counted(samples: list[int], threshold: int, run: int, patience: int) -> str:
    """The count after each sample; without patience it is not set back by a sample below the threshold."""
    steps, row, number = "", 0, 0
    for number, sample in enumerate(samples, 1):
        row = row + 1 if sample > threshold else row * (1 - patience)
        steps += f"#{number} has {row}; "
        if row == run:
            break
    return answered(steps, f"{number * _PERIOD_MS} ms")


def _samples(rng: random.Random, values: range, threshold: float, run: int, longest: int) -> list[int]:
    """Drawn until a report is due within the list, with an interruption before it in most cases."""
    while True:
        samples = [rng.choice(values) for _ in range(longest)]
        at = report_at(samples, threshold, run)
        broken = at is not None and sum(sample > threshold for sample in samples[:at]) > run
        if at is not None and (broken or rng.random() < 0.2):
            return samples


def easy_words() -> dict[str, list[str]]:
    """Family -> every piece of its prompts and solutions of difficulty 1."""
    gains = [f"{gain:+d} dB; " for gain in _GAINS]
    levels = [f"{level} dBm" for level in range(_LOWEST, _HIGHEST + 1)]
    stages = [piece for stage in _STAGES for piece in (f"stage {stage} ", f"{stage}: ")]
    numbered = [f"#{number} {value:+d} dB; " for number in _EASY_SAMPLES for value in _DIFFERENCES]
    counts = [f"#{number} has {count}; " for number in _EASY_SAMPLES for count in range(5)]
    times = [f"{number * _PERIOD_MS} ms" for number in _EASY_SAMPLES]
    asked = [f"threshold {value} dB; " for value in range(1, 5)] + [f"{run} in a row. " for run in range(2, 5)]
    return {
        "link_budget": [_EASY_BUDGET, _EASY_END, *stages, *gains, *levels, *(f"{level}; " for level in levels)],
        "handover": [_A3, _A3_RULE, *numbered, *counts, *times, *asked],
    }
