"""The built-in telecom task: families of questions with one checkable answer each.

Invariants:
- A question says the unit and the precision that it wants; the row's verifier has both (`Question.answer`).
- What a formula or standard says is in the family's docstring, with the source.
"""

from forebay.data.question import Draw
from forebay.data.telecom import alarms, radio
from forebay.data.telecom.addressing import draw_ipv4, draw_ipv6
from forebay.data.telecom.alarms import draw_alarm
from forebay.data.telecom.manual import draw_manual
from forebay.data.telecom.radio import draw_handover, draw_link_budget
from forebay.data.telecom.throughput import draw_throughput
from forebay.data.telecom.timers import draw_timer
from forebay.data.telecom.tool_calls import draw_tool_call
from forebay.data.telecom.traffic import draw_erlang_b, draw_erlang_c

FAMILIES: dict[str, Draw] = {
    "link_budget": draw_link_budget,
    "erlang_b": draw_erlang_b,
    "erlang_c": draw_erlang_c,
    "ipv4": draw_ipv4,
    "ipv6": draw_ipv6,
    "alarm": draw_alarm,
    "handover": draw_handover,
    "timer": draw_timer,
    "throughput": draw_throughput,
    "tool_call": draw_tool_call,
    "manual": draw_manual,
}

EASY_WORDS: dict[str, list[str]] = {"alarm": alarms.easy_words(), **radio.easy_words()}
"""Family -> every piece of its questions and solutions of difficulty 1, where these are few enough for a tiny model."""
