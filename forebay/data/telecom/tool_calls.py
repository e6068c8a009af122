"""Telecom family `tool_call`: an operator's request as calls of tools, in JSON.

Invariants:
- The question has all tools with their parameters, types and units, and every value that a right call needs.
- Difficulty 1: one tool; 2: one call, the tool to be chosen out of all; 3: two calls in order, with values that must be
  converted to the parameters' units.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from forebay.data.question import Question

Call = dict[str, Any]
_TOOLS = {
    "get_counter": {"cell": "string", "counter": "string", "minutes": "integer, the last so many minutes"},
    "set_parameter": {"cell": "string", "name": "string", "value": "number, in dB for levels, ms for timers"},
    "open_ticket": {"element": "string", "severity": "critical | major | minor", "team": "radio | core | transport"},
    "lock_cell": {"cell": "string", "graceful": "boolean, true waits for calls to end"},
    "ping": {"address": "string", "count": "integer", "size": "integer, bytes"},
}
_SPANS = {"half hour": 30, "hour": 60, "two hours": 120, "quarter of an hour": 15, "day": 1440}


def draw_tool_call(rng: random.Random, difficulty: int) -> Question:
    """A request and the expected call or calls."""
    asked = rng.sample(list(_REQUESTS), 2 if difficulty == 3 else 1)
    parts = [_REQUESTS[name](rng, difficulty == 3) for name in asked]
    shown = asked if difficulty == 1 else list(_TOOLS)
    tools = "\n".join(json.dumps({"name": name, "parameters": _TOOLS[name]}) for name in shown)
    calls = [{"name": name, "arguments": arguments} for name, (_, arguments) in zip(asked, parts, strict=True)]
    how = (
        "Answer with one JSON object"
        if difficulty < 3
        else "Answer with one JSON object for each call, in the order asked"
    )
    prompt = (
        f"Tools:\n{tools}\nRequest: {' Then: '.join(text for text, _ in parts)}\n"
        f'{how}: {{"name": ..., "arguments": {{...}}}}, with every parameter.'
    )
    solution = "\n".join(json.dumps(call) for call in calls)
    answer = calls if difficulty == 3 else calls[0]
    return Question(prompt, answer, "json_call", ("family:tool_call", f"difficulty:{difficulty}"), solution)


def _cell(rng: random.Random) -> str:
    return f"{rng.choice(('LON', 'OSL', 'PAR', 'WAW', 'NCE'))}{rng.randint(1, 400):03d}-{rng.choice('ABC')}"


def _counter(rng: random.Random, convert: bool) -> tuple[str, Call]:
    cell = _cell(rng)
    counter = rng.choice(("rrc_setup_failures", "handover_failures", "prb_utilisation", "dropped_calls"))
    minutes = rng.choice((5, 15, 30, 60, 90))
    span = f"{minutes} minutes"
    if convert:
        span, minutes = rng.choice(list(_SPANS.items()))
    return f"Show {counter} of cell {cell} for the last {span}.", {"cell": cell, "counter": counter, "minutes": minutes}


def _parameter(rng: random.Random, convert: bool) -> tuple[str, Call]:
    cell, seconds = _cell(rng), rng.choice((0.1, 0.2, 0.5, 1, 2))
    name, value = rng.choice((("a3_offset", rng.randint(-6, 6)), ("t310", int(1000 * seconds))))
    shown = f"{value} dB" if name == "a3_offset" else f"{seconds:g} s" if convert else f"{value} ms"
    return f"Set {name} of cell {cell} to {shown}.", {"cell": cell, "name": name, "value": value}


def _ticket(rng: random.Random, convert: bool) -> tuple[str, Call]:
    element = f"{rng.choice(('RTR', 'OLT', 'BBU', 'AMF', 'UPF'))}-{rng.randint(1, 99)}"
    severity, team = rng.choice(("critical", "major", "minor")), rng.choice(("radio", "core", "transport"))
    text = f"Open a {severity} ticket on {element} for the {team} team."
    return text, {"element": element, "severity": severity, "team": team}


def _lock(rng: random.Random, convert: bool) -> tuple[str, Call]:
    cell, graceful = _cell(rng), rng.random() < 0.5
    how = "as soon as running calls have ended" if graceful else "at once, without waiting for running calls"
    return f"Lock cell {cell} {how}.", {"cell": cell, "graceful": graceful}


def _ping(rng: random.Random, convert: bool) -> tuple[str, Call]:
    address, count = f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(1, 254)}", rng.randint(3, 20)
    size = rng.choice((64, 512, 1024, 1472, 2048))
    shown = f"{size // 1024} KiB" if convert and size % 1024 == 0 else f"{size} bytes"
    return f"Ping {address} {count} times with {shown}.", {"address": address, "count": count, "size": size}


_REQUESTS: dict[str, Callable[[random.Random, bool], tuple[str, Call]]] = {
    "get_counter": _counter,
    "set_parameter": _parameter,
    "open_ticket": _ticket,
    "lock_cell": _lock,
    "ping": _ping,
}
"""Tool -> draws (request, arguments)."""
