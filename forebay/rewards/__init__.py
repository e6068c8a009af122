"""Rewards by name, or the user's own `package.module:function`. docs/rewards.md is the manual.

Invariants:
- A verifier is a function of response, answer (what the row's JSON decodes to) and prompt, and of nothing else.
- It gives a score, a verdict and a reason; one that breaks gives none, and that is never read as 0.
- Verifiers run in `forebay.rewards.pool`, in processes that are killed when they hang, never in the control loop.
"""

from forebay.rewards.judgement import Judgement, Verdict
from forebay.rewards.verifier import BUILT_IN, Verifier, load_verifier

__all__ = ["BUILT_IN", "Judgement", "Verdict", "Verifier", "load_verifier"]
