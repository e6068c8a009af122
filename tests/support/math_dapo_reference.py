r"""What verl's reward for DAPO accepts, said again in other words, as the reference for our `dapo_math`.

After `verl/utils/reward_score/math_dapo.py` (verl-project/verl at 57565332, Apache-2.0, Copyright 2024 Bytedance and
2022 EleutherAI), whose normalisation is that of Lewkowycz et al. 2022, appendix D.1. It shares no code with Forebay:
the answer is cut down step by step, as a list of rewriting rules applied in turn.
"""

import re

TAIL, BOX_TAIL = 300, 100

REPLACE = [
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
]  # fmt: skip
_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{}^2 \\text{}^3 \\text{} "
    '\\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
REMOVE = _REMOVED.split()
REWRITE = [
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
]


def dapo_accepts(response: str, truth: str) -> bool:
    """Score 1 rather than -1: the last `Answer:` line of the tail, else the last box of a shorter tail."""
    tail = response[-TAIL:]
    answers = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    given = answers[-1] if answers else _last_box(tail[-BOX_TAIL:])
    return given is not None and _reduced(given) == _reduced(truth)


def _reduced(text: str) -> str:
    text = text.split("=")[-1]
    for old, new in REPLACE:
        text = text.replace(old, new)
    for word in REMOVE:
        text = text.replace(word, "")
    for pattern, new in REWRITE:
        text = re.sub(pattern, new, text)
    text = text.replace("$", "")
    return text.replace(",", "").strip() if text.replace(",", "").isdigit() else text.strip()


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at, letter in enumerate(text[start:], start):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return text[start + len("\\boxed{") : at]
    return None
