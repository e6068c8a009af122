"""Verifier of reasoning-gym's tasks: the full score of the task's own verifier, or nothing."""

from typing import Any

from forebay.data.reasoning_gym import data_set
from forebay.rewards.extract import visible
from forebay.rewards.judgement import Judgement, right, wrong

_LINE = "answer:"
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """`answer`: {"task": name, "seed": of the item}. All that follows the last `Answer:` counts: answers may have
    several lines. Raises `TypeError`."""
    if not isinstance(answer, dict) or not {"task", "seed"} <= set(answer):
        raise TypeError('reward reasoning_gym needs {"task": name, "seed": number}')
    text = visible(response)
    at = text.lower().rfind(_LINE)
    if at < 0:
        return wrong("no Answer: line")
    given = text[at + len(_LINE) :].strip()
    tasks = data_set(answer["task"], answer["seed"])
    try:
        full = tasks.score_answer(given, tasks[0]) == 1.0
    except _UNREADABLE as error:  # several tasks raise for what they cannot read; their own answer they can
        return wrong(f"the task cannot read it ({type(error).__name__})")
    return right("the task's full score") if full else wrong("less than the task's full score")
