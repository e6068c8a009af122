"""Soft penalty for responses that come near the token limit (DAPO, arXiv 2503.14476, equation 13)."""

from typing import Any

from forebay.rewards.judgement import Judgement, Verdict
from forebay.training.algorithms.overlong import overlong_penalty


def score(response: str, answer: Any, prompt: str, *, tokens: int, budget: int, buffer: int | None = None) -> Judgement:
    """0 up to `budget` - `buffer` response tokens, from there linearly down to -1 at `budget`. The pool gives `tokens`
    and, unless set as an option, `budget` (generation.max_new_tokens); `buffer`: a quarter of the budget."""
    room = budget // 4 if buffer is None else buffer
    if not 0 < room <= budget:
        raise ValueError(f"reward overlong: buffer {room} must be from 1 to the budget, {budget} tokens")
    penalty = float(overlong_penalty([tokens], budget, room, 1.0)[0]) + 0.0
    verdict: Verdict = "right" if penalty == 0.0 else "wrong" if penalty == -1.0 else "partial"
    return Judgement(penalty, verdict, f"{tokens} of {budget} tokens, penalty from {budget - room} on")
