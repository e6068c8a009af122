"""Telecom family `manual`: look-ups in the synthetic operations manual that is shipped as `manual.txt`.

Invariants:
- The question quotes the lines that the answer needs, among others, so that it can be answered without knowing the
  manual by heart; difficulty is the number of lines and of hops.
- Everything is read from the file: a changed manual changes the questions, not this code.
"""

import random
import re
from functools import cache
from importlib.resources import files
from typing import Any

from forebay.data.question import Question, answered, quantity

_LINES = {1: 5, 2: 20, 3: 20}
_ALARM = re.compile(
    r"Alarm (?P<code>\d+): (?P<name>.+?)\. Severity (?P<severity>\w+)\. Team (?P<team>\w+)\. "
    r"First action: (?P<action>.+?)\. Respond within (?P<minutes>\d+) minutes\."
)
_PARAMETER = re.compile(r"Parameter (?P<name>.+) in (?P<area>\w+) cells: (?P<value>[-\d.]+)(?: (?P<unit>\w+))?\.")
_TEAM = re.compile(
    r"Team (?P<team>\w+): extension (?P<extension>\d+); "
    r"escalation after (?P<minutes>\d+) minutes to the (?P<chief>.+)\."
)
_COPY = " Give it as it stands in the manual."

Asked = tuple[list[str], str, Any]
"""Lines that the answer needs, question, answer."""


@cache
def sections() -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Kind of line -> (line, its fields)."""
    text = files(__package__).joinpath("manual.txt").read_text(encoding="utf-8")
    kinds = {"alarm": _ALARM, "parameter": _PARAMETER, "team": _TEAM}
    return {
        kind: [(line, match.groupdict()) for line in text.splitlines() if (match := pattern.fullmatch(line))]
        for kind, pattern in kinds.items()
    }


def draw_manual(rng: random.Random, difficulty: int) -> Question:
    """1: an alarm's entry; 2: a parameter's value, or the rest of an entry; 3: how an alarm's team escalates."""
    draw = (_entry, rng.choice((_parameter, _rest)), _escalation)[difficulty - 1]
    needed, asked, answer = draw(rng)
    prompt = f"From the operations manual:\n{_excerpt(rng, needed, _LINES[difficulty])}\n\nQuestion: {asked}"
    verifier = "math" if isinstance(answer, str) else "numeric"
    return Question(
        prompt, answer, verifier, ("family:manual", f"difficulty:{difficulty}"), answered("", _written(answer))
    )


def _entry(rng: random.Random) -> Asked:
    line, alarm = rng.choice(sections()["alarm"])
    where = _named(rng, alarm)
    return rng.choice(
        (
            ([line], f"What is the severity of {where}?{_COPY}", alarm["severity"]),
            ([line], f"Which team is responsible for {where}?{_COPY}", alarm["team"]),
            (
                [line],
                f"Within how many minutes must one respond to {where}? Give minutes, as in 5 min.",
                quantity(int(alarm["minutes"]), "min"),
            ),
        )
    )


def _rest(rng: random.Random) -> Asked:
    line, alarm = rng.choice(sections()["alarm"])
    return rng.choice(
        (
            ([line], f"What is the first action for {_named(rng, alarm)}?{_COPY}", alarm["action"]),
            ([line], f'Which number does the alarm "{alarm["name"]}" have?', int(alarm["code"])),
            ([line], f"What is alarm {alarm['code']} called?{_COPY}", alarm["name"]),
        )
    )


def _parameter(rng: random.Random) -> Asked:
    line, entry = rng.choice(sections()["parameter"])
    unit = entry["unit"] or ""
    asked = f"What is the value of {entry['name']} in {entry['area']} cells" + (f", in {unit}?" if unit else "?")
    return [line], asked, quantity(float(entry["value"]), unit)


def _escalation(rng: random.Random) -> Asked:
    line, alarm = rng.choice(sections()["alarm"])
    where = _named(rng, alarm)
    team_line, team = next(entry for entry in sections()["team"] if entry[1]["team"] == alarm["team"])
    lines, minutes = [line, team_line], int(alarm["minutes"]) + int(team["minutes"])
    return rng.choice(
        (
            (
                lines,
                f"Which extension does the team that is responsible for {where} have? Give the number.",
                int(team["extension"]),
            ),
            (lines, f"To whom is {where} escalated?{_COPY}", team["chief"]),
            (
                lines,
                f"The response to {where} starts at the last allowed minute, and the team escalates after its own time "
                "from then on. How many minutes after the alarm is that? Give minutes, as in 5 min.",
                quantity(minutes, "min"),
            ),
        )
    )


def _named(rng: random.Random, alarm: dict[str, str]) -> str:
    return rng.choice((f"alarm {alarm['code']}", f'the alarm "{alarm["name"]}"'))


def _excerpt(rng: random.Random, needed: list[str], lines: int) -> str:
    others = [line for entries in sections().values() for line, _ in entries if line not in needed]
    shown = needed + rng.sample(others, lines - len(needed))
    rng.shuffle(shown)
    return "\n".join(shown)


def _written(answer: object) -> str:
    if isinstance(answer, dict):
        return f"{answer['value']:g} {answer['unit']}".strip()
    return str(answer)
