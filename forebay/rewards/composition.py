"""The score of a response as the profile composes it: the weighted sum of several verifiers.

Invariants:
- Verdict and reason of a sum: the first term's verdict, every term's reason. If a term failed or timed out, so did the
  sum: nothing is scored by what happens to be left.
- A row's own verifier stands for the term `answer`. A row may name built-in verifiers and those that the profile names,
  no other function: data must not decide what code runs.
- A verifier that raises or returns rubbish has failed, for that response (or, if it takes them all, for all of them).
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.config import RewardConfig
from forebay.errors import UserError
from forebay.rewards.judgement import Judgement, failed, judgement_of
from forebay.rewards.verifier import BUILT_IN, Verifier, load_verifier

ANSWER = "answer"
"""The term that is `reward.name`, or the row's own verifier."""

_loop = asyncio.Runner()
"""One event loop for the process's life, so that a user's function can keep its connections."""

Emit = Callable[[int, Judgement], None]
"""Is given the place of a response in its group, and its judgement."""
Term = tuple[Verifier, float]


@dataclass(frozen=True, slots=True)
class Response:
    """What there is to judge."""

    text: str
    tokens: int
    finished: bool
    """False: cut off at the token limit."""


@dataclass(frozen=True, slots=True)
class Group:
    """The responses to one prompt, with what verifiers get beside them."""

    responses: Sequence[Response]
    answer: Any
    prompt: str
    score_truncated: bool
    """Judge responses that were cut off like any other (`reward.truncated: score`)."""


class Composition:
    """The terms of a reward. `budget`: response tokens allowed. Raises `UserError` if one cannot be loaded."""

    def __init__(self, reward: RewardConfig, budget: int) -> None:
        self._reward, self._budget = reward, budget
        self._loaded: dict[str, Verifier] = {}
        self.terms("")
        for name in reward.options:
            self._verifier(name)

    def terms(self, row_verifier: str) -> list[Term]:
        """For rows with this verifier; "" for those that name none. Raises `UserError`."""
        if not may_name(self._reward, row_verifier):
            raise UserError(
                f"verifier {row_verifier} of this row is neither built in nor named in the profile (reward.options)"
            )
        answer = row_verifier or self._reward.name
        return [
            (self._verifier(answer if name == ANSWER else name), weight)
            for name, weight in self._reward.weights.items()
        ]

    def _verifier(self, name: str) -> Verifier:
        if name not in self._loaded:
            options = dict(self._reward.options.get(name, {}))
            if name == "overlong":
                options.setdefault("budget", self._budget)
            self._loaded[name] = load_verifier(name, options)
        return self._loaded[name]


def may_name(reward: RewardConfig, row_verifier: str) -> bool:
    """Whether a row may name this verifier."""
    return not row_verifier or row_verifier in {*BUILT_IN, reward.name, *reward.weights, *reward.options} - {ANSWER}


def together(terms: Sequence[Term]) -> bool:
    """Whether the responses to a prompt are judged at the same time, not one after another."""
    return any(verifier.batch or verifier.asynchronous for verifier, _ in terms)


def judge_group(terms: Sequence[Term], group: Group, emit: Emit) -> None:
    """Give each response's judgement to `emit`, as soon as it is there."""
    if together(terms):
        _loop.run(_judge_together(terms, group, emit))
        return
    for place, response in enumerate(group.responses):
        parts = [
            _cut_off(verifier, response, group) or _guarded(_call(verifier, response, group)) for verifier, _ in terms
        ]
        emit(place, summed(terms, parts))


def summed(terms: Sequence[Term], parts: Sequence[Judgement]) -> Judgement:
    """The weighted sum of the terms' judgements of one response."""
    if len(terms) == 1 and terms[0][1] == 1.0:
        return parts[0]
    for (verifier, _), part in zip(terms, parts, strict=True):
        if part.score is None:
            return Judgement(None, part.verdict, f"{verifier.name}: {part.reason}")
    score = sum(weight * (part.score or 0.0) for (_, weight), part in zip(terms, parts, strict=True))
    told = "; ".join(
        f"{verifier.name} {part.score:g}" + (f" ({part.reason})" if part.reason else "")
        for (verifier, _), part in zip(terms, parts, strict=True)
    )
    return Judgement(score, parts[0].verdict, told) if math.isfinite(score) else failed(f"the sum is {score}: {told}")


async def _judge_together(terms: Sequence[Term], group: Group, emit: Emit) -> None:
    batches = {v.name: asyncio.create_task(_batch(v, group)) for v, _ in terms if v.batch}

    async def one(place: int) -> None:
        parts, response = [], group.responses[place]
        for verifier, _ in terms:
            if verifier.batch:
                parts.append((await batches[verifier.name])[place])
            elif cut := _cut_off(verifier, response, group):
                parts.append(cut)
            else:
                parts.append(judgement_of(await _value(verifier, _call(verifier, response, group))))
        emit(place, summed(terms, parts))

    await asyncio.gather(*(one(place) for place in range(len(group.responses))))


async def _batch(verifier: Verifier, group: Group) -> list[Judgement]:
    judged = [_cut_off(verifier, response, group) for response in group.responses]
    asked = [response for response, cut in zip(group.responses, judged, strict=True) if cut is None]
    options = {"tokens": [response.tokens for response in asked]} if verifier.counts_tokens else {}
    texts = [response.text for response in asked]
    values = (
        await _value(verifier, lambda: verifier.function(texts, group.answer, group.prompt, **options)) if asked else []
    )
    if isinstance(values, Judgement):
        answers = [values] * len(asked)
    elif isinstance(values, Mapping | str) or not hasattr(values, "__len__") or len(values) != len(asked):
        answers = [failed(f"must return a list of {len(asked)} scores")] * len(asked)
    else:
        answers = [judgement_of(value) for value in values]
    rest = iter(answers)
    return [cut or next(rest) for cut in judged]


def _cut_off(verifier: Verifier, response: Response, group: Group) -> Judgement | None:
    if response.finished or group.score_truncated or verifier.counts_tokens:
        return None
    return Judgement(0.0, "cut_off", f"cut off at the token limit, after {response.tokens} tokens")


def _call(verifier: Verifier, response: Response, group: Group) -> Callable[[], Any]:
    options = {"tokens": response.tokens} if verifier.counts_tokens else {}
    return lambda: verifier.function(response.text, group.answer, group.prompt, **options)


def _guarded(call: Callable[[], Any]) -> Judgement:
    try:
        return judgement_of(call())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's and may raise anything
        return _raised(error)


async def _value(verifier: Verifier, call: Callable[[], Any]) -> Any:
    """What it returns, awaited if need be; a `failed` judgement if it raises."""
    try:
        value = call()
        return await value if verifier.asynchronous else value
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's and may raise anything
        return _raised(error)


def _raised(error: BaseException) -> Judgement:
    return failed(f"raised {type(error).__name__}: {error}")
