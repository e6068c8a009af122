r"""Plain numbers and their units, read exactly.

Invariants:
- A number is a literal: 42, 1,000, 1 000, -3.5, .5, 1e3, 3/4, \frac{3}{4}, 1\frac{1}{2}, 3 \times 10^{8}. Anything that
  has to be worked out (17+25, \frac{84}{2}, 6 \cdot 7) is none. Values are exact fractions.
- A unit is compared by name after spelling variants (seconds, s). `%` and `°` are units like any other: 50% is not 0.5.
- Only units in `FACTORS` convert into each other, and only for who asks.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from forebay.rewards.extract import closed

_LARGEST_EXPONENT = 400
"""Of ten; beyond it a text is no number."""

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:([0-9]+)/([0-9]+)"
    rf"|([0-9]*)\s*\\[dt]?frac\{{([-+]?[0-9]+)\}}\{{([0-9]+)\}}"
    rf"|({_DECIMAL})(?:[eE]([-+]?[0-9]{{1,4}})(?![0-9])|\s*(?:\\times|\\cdot|\*)\s*10\^\s*\{{?\s*([-+]?[0-9]{{1,4}})\s*\}}?)?)"
)
_UNIT = re.compile(r"\s*([A-Za-zµΩ°%][A-Za-zµΩ°%/^0-9 ]*)?")

_LETTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{FULLWIDTH HYPHEN-MINUS}": "-",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{GREEK SMALL LETTER PI}": r"\pi ",
        "\N{INFINITY}": r"\infty ",
        "\N{UNION}": r"\cup ",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
        "\N{SUPERSCRIPT TWO}": "^2",
        "\N{SUPERSCRIPT THREE}": "^3",
        "\N{GREEK SMALL LETTER MU}": "\N{MICRO SIGN}",
        "\N{OHM SIGN}": "\N{GREEK CAPITAL LETTER OMEGA}",
    }
)

_SPELLED = {
    "°": ("degree", "degrees", "deg"),
    "%": ("percent", "per cent"),
    "s": ("sec", "second", "seconds"),
    "ms": ("millisecond", "milliseconds", "msec"),
    "µs": ("microsecond", "microseconds", "us"),
    "ns": ("nanosecond", "nanoseconds"),
    "min": ("minute", "minutes"),
    "h": ("hour", "hours", "hr"),
    "m": ("meter", "meters", "metre", "metres"),
    "km": ("kilometer", "kilometers", "kilometre", "kilometres"),
    "bit/s": ("bps", "bits/s", "b/s"),
    "kbit/s": ("kbps", "kb/s"),
    "Mbit/s": ("Mbps", "Mb/s", "megabit/s"),
    "Gbit/s": ("Gbps", "Gb/s"),
    "bit": ("bits",),
    "B": ("byte", "bytes"),
    "Erl": ("Erlang", "Erlangs", "erlang", "erlangs"),
}
_NAMES = {spelling: unit for unit, spellings in _SPELLED.items() for spelling in spellings}

FACTORS: dict[str, tuple[str, Fraction]] = {
    name: (kind, Fraction(factor))
    for kind, units in {
        "time": {"ns": "1e-9", "µs": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"},
        "length": {"mm": "1e-3", "cm": "1e-2", "m": "1", "km": "1e3"},
        "frequency": {"Hz": "1", "kHz": "1e3", "MHz": "1e6", "GHz": "1e9"},
        "rate": {"bit/s": "1", "kbit/s": "1e3", "Mbit/s": "1e6", "Gbit/s": "1e9"},
        "data": {
            "bit": "1",
            "kbit": "1e3",
            "Mbit": "1e6",
            "Gbit": "1e9",
            "B": "8",
            "kB": "8e3",
            "MB": "8e6",
            "GB": "8e9",
        },
        "power": {"µW": "1e-6", "mW": "1e-3", "W": "1", "kW": "1e3"},
    }.items()
    for name, factor in units.items()
}
"""Unit -> (what it measures, factor). Decibels of any kind are not here: dB, dBm and dBi never equal each other."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A plain number with its unit."""

    value: Fraction
    unit: str = ""
    power_of_ten: bool = False
    r"""Written as m \times 10^n: a literal for physics, arithmetic to be done for who asks for a plain number."""


def plain(text: str) -> str:
    r"""Without what only formats: dollar signs, thin spaces, \text{}, \left, ...; unicode signs as LaTeX."""
    text = text.strip().translate(_LETTERS).replace("{,}", ",").replace("\\%", "%")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,!;: ()\[\]]|\\?\$", "", text)
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1", text)
    text = re.sub(r"([0-9])\s*\\mu\s*([smW])(?![a-z])", r"\1 µ\2", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\\circ\})", "°", text)
    text = re.sub(r"\\([dt]?frac)\s*([0-9])\s*([0-9])(?![0-9])", r"\\\1{\2}{\3}", text)
    while text.startswith("{") and closed(text, 1) == text[1:-1]:
        text = text[1:-1]
    return " ".join(text.split())


def quantity(text: str, *, reduced: bool = True) -> Quantity | None:
    """What `plain` gave, as a number with its unit; None for anything else. `reduced`: 2/4 and 84/2 are none."""
    match = _NUMBER.match(text)
    unit = _UNIT.fullmatch(text, match.end()) if match else None
    if match is None or unit is None:
        return None
    sign, top, bottom, whole, latex_top, latex_bottom, decimal, exponent, power = match.groups()
    if decimal is not None:
        digits = int(exponent or power or 0)
        if abs(digits) > _LARGEST_EXPONENT:
            return None
        value = Fraction(re.sub("[, ]", "", decimal)) * Fraction(10) ** digits
    else:
        above, below = int(top or latex_top), int(bottom or latex_bottom)
        proper = not whole or 0 < above < below
        if not proper or below == 0 or (reduced and (below == 1 or gcd(above, below) > 1)):
            return None
        value = int(whole or 0) + Fraction(above, below)
    return Quantity(-value if sign == "-" else value, unit_name(unit[1] or ""), power is not None)


def unit_name(text: str) -> str:
    """One spelling for each unit that has several."""
    name = text.translate(_LETTERS).strip()
    return _NAMES.get(name, name)


def converted(given: Quantity, unit: str) -> Fraction | None:
    """Its value in that unit; None if it has another kind of unit."""
    if given.unit == unit:
        return given.value
    one, other = FACTORS.get(given.unit), FACTORS.get(unit)
    if one is None or other is None or one[0] != other[0]:
        return None
    return given.value * one[1] / other[1]
