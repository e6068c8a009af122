r"""Verifier of a response's form: thinking in tags, then a boxed answer; or the user's own pattern.

Invariant: without a pattern, time is linear. A pattern may backtrack for ever; the pool ends it.
"""

import re
from typing import Any

from forebay.rewards.extract import boxed
from forebay.rewards.judgement import Judgement, right, wrong


def score(response: str, answer: Any, prompt: str, *, pattern: str | None = None, opened: bool = False) -> Judgement:
    r"""1.0 if the whole response is `<think>...</think>` once, with something in it, and then something that contains
    a closed, non-empty `\boxed{...}`. `opened`: the prompt's template has written `<think>` already. `pattern`: 1.0 if
    this regular expression matches the whole response (`.` matches line ends too) instead."""
    if pattern is not None:
        matched = re.fullmatch(pattern, response, re.DOTALL)
        return right("matches the pattern") if matched else wrong("does not match the pattern")
    text = response.strip()
    thought, ended, _ = text.partition("</think>")
    if not opened and not thought.startswith("<think>"):
        return wrong("does not begin with <think>")
    thought = thought if opened else thought.removeprefix("<think>")
    if not ended:
        return wrong("no </think>")
    if not thought.strip():
        return wrong("no thought between the tags")
    if "<think>" in thought or "</think>" in text.partition("</think>")[2]:
        return wrong("more than one thought")
    box = boxed(text)
    return wrong(box.problem) if box.problem else right("thought, then box")
