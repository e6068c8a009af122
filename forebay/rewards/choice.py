r"""Verifier for multiple choice: one letter, or the text of the option.

Invariants:
- One choice counts: `A or B`, `A, B` and a letter in the midst of a sentence are none.
- The choice is the last box, else the last `Answer:` line, else a letter that stands alone at the end: `B`, `(B)`,
  `The answer is B.`
"""

import re
from typing import Any

from forebay.rewards.extract import final_answer, visible
from forebay.rewards.judgement import Judgement, right, wrong
from forebay.rewards.numbers import plain

_LETTER = re.compile(r"\(?([A-Za-z])(?:\)|\.|:)?")
_WITH_TEXT = re.compile(r"\(?([A-Za-z])(?:[).:]|\s-)\s*(\S.*)")
_ENDS = re.compile(
    r"(?:^|\n|\b(?:is|option|choice|choose|select|pick)[\s:]*)[\s*_(]*([A-Za-z])[)\s.*_]*\Z", re.IGNORECASE
)


def score(response: str, answer: Any, prompt: str, *, options: dict[str, str] | None = None) -> Judgement:
    """`answer`: the letter, or {"choice": letter, "options": {letter: text}}. With the options' texts a response may
    also give the text (letter case and white space aside); a letter with a text that is not its own is wrong."""
    if isinstance(answer, dict):
        answer, options = answer.get("choice"), answer.get("options", options)
    if not isinstance(answer, str) or not re.fullmatch("[A-Za-z]", answer):
        raise TypeError(f"reward choice needs a letter, not {answer!r}")
    texts = {letter.upper(): _folded(text) for letter, text in (options or {}).items()}
    found = final_answer(response)
    if found.rule in ("boxed", "answer_line"):
        if found.problem:
            return wrong(found.problem)
        given = _choice(plain(found.text), texts)
    else:
        last = _ENDS.search(visible(response)[-80:].rstrip())
        given = last[1].upper() if last else None
    if given is None:
        return wrong(f"{found.text or 'the end'} is no single choice")
    return right(f"chose {given}") if given == answer.upper() else wrong(f"chose {given}, not {answer.upper()}")


def _choice(text: str, texts: dict[str, str]) -> str | None:
    text = text.strip().rstrip(".")
    alone = _LETTER.fullmatch(text)
    if alone:
        return alone[1].upper()
    both = _WITH_TEXT.fullmatch(text)
    if both:
        letter = both[1].upper()
        return letter if not texts or texts.get(letter) == _folded(both[2]) else None
    same = [letter for letter, option in texts.items() if option == _folded(text)]
    return same[0] if len(same) == 1 else None


def _folded(text: str) -> str:
    return " ".join(plain(str(text)).rstrip(".").split()).casefold()
