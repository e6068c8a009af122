"""The Control Unit's state in Prometheus's text format, version 0.0.4.

Invariants:
- It says what `ControlUnit.status()` says, at the same moment, and nothing else.
- Of `forebay_groups_total` every fate is there, also with 0, and the fates and `forebay_groups_in_flight` add up to
  `forebay_groups_admitted_total`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTS = ("admitted", "in_flight")
"""Of the account: what is not a fate."""

Series = Iterable[tuple[Mapping[str, str], float]]
"""Of one metric: labels and value."""


def exposition(status: Mapping[str, Any]) -> str:
    """The text for a scrape of what `ControlUnit.status()` gave."""
    fates = status["fates"]
    left = [({"fate": fate}, count) for fate, count in fates.items() if fate not in COUNTS]
    verdicts = [({"verdict": verdict}, count) for verdict, count in status["verdicts"].items()]
    versions = [({"engine": str(key)}, version) for key, version in status["engines"].items()]
    metrics = [
        _metric("groups_admitted_total", "counter", "Groups that were admitted.", _one(fates["admitted"])),
        _metric("groups_total", "counter", "Groups that have left, by fate.", left),
        _metric("groups_in_flight", "gauge", "Groups that have no fate yet.", _one(fates["in_flight"])),
        _metric("responses_total", "counter", "Responses judged, by their verifier's verdict.", verdicts),
        _metric("generating_groups", "gauge", "Groups that engines work on.", _one(status["generating"])),
        _metric("queued_groups", "gauge", "Groups in the Training Queue.", _one(status["queued"])),
        _metric("credits_batches", "gauge", "Groups that may be outstanding, in batches.", _one(status["credits"])),
        _metric("step", "gauge", "Optimizer steps done.", _one(status["step"])),
        _metric("steps", "gauge", "Optimizer steps of the whole run.", _one(status["steps"])),
        _metric("version", "gauge", "Newest published policy version.", _one(status["version"])),
        _metric("engine_version", "gauge", "Policy version that an engine serves.", versions),
    ]
    return "".join(metrics)


def _one(value: float) -> Series:
    return [({}, value)]


def _metric(name: str, kind: str, text: str, series: Series) -> str:
    name = f"forebay_{name}"
    lines = [f"# HELP {name} {_escape(text)}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value}" for labels, value in series]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{key}="{_escape(value, quoted=True)}"' for key, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escape(text: str, *, quoted: bool = False) -> str:
    """Backslash and line feed; the double quote too where it would end the text."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
