"""What a verifier says of one response.

Invariants:
- `score` is a finite number, or None exactly if the verdict is `failed` or `timed_out`: a verifier that broke has not
  judged, and nobody may read that as 0.
- `reason` is one line for people; it may be empty for a user's function that gives a bare number.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Verdict = Literal["right", "partial", "wrong", "cut_off", "failed", "timed_out"]
"""`cut_off`: ended by the token limit and scored 0 for that (`reward.truncated: zero`). `failed`: the verifier raised,
returned rubbish or ended its process. `timed_out`: it did not come to an end."""

_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Judgement:
    """Score, verdict and reason of one response. A reward function may return one, or a bare number."""

    score: float | None
    verdict: Verdict
    reason: str = ""


def right(reason: str) -> Judgement:
    return Judgement(1.0, "right", _line(reason))


def wrong(reason: str) -> Judgement:
    return Judgement(0.0, "wrong", _line(reason))


def failed(reason: str) -> Judgement:
    return Judgement(None, "failed", _line(reason))


def timed_out(reason: str) -> Judgement:
    return Judgement(None, "timed_out", _line(reason))


def judgement_of(value: Any) -> Judgement:
    """What a reward function returned: a `Judgement` as it is, a number as right (1 or more), wrong (0 or less) or
    partial. `failed` if it is neither, or not finite."""
    if isinstance(value, Judgement):
        broken, score = value.verdict in ("failed", "timed_out"), value.score
        if value.verdict in get_args(Verdict) and broken == (score is None) and math.isfinite(score or 0.0):
            return Judgement(None if score is None else float(score), value.verdict, _line(str(value.reason)))
        return failed(f"the reward function returned verdict {value.verdict} with score {score}")
    try:
        score = float(value)
    except (TypeError, ValueError):
        return failed(f"the reward function returned {value!r}, not a number")
    if not math.isfinite(score):
        return failed(f"the reward function returned {score}, not a finite number")
    return Judgement(score, "right" if score >= 1.0 else "wrong" if score <= 0.0 else "partial")


def _line(text: str) -> str:
    return " ".join(text[:_LONGEST_REASON].split())
