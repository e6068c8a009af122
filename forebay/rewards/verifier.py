"""Verifiers by name: finding the function, and checking its signature before anything runs.

A verifier is `function(response: str, answer, prompt: str) -> float | Judgement`, or `async def` of the same. If its
first parameter is named `responses`, it gets all responses to one prompt at once, in a list, and returns a list. A
parameter named `tokens` gets the response's length in tokens (a list of them if `responses`); such a verifier judges
length and is asked about responses that were cut off, too. All other parameters are options (`reward.options`) and need
a default or a value there. The three are given by place, under any names but those that say another place: a function
written for another library must not be judged by its answer instead of the response.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from forebay.errors import UserError

BUILT_IN = {
    name: f"forebay.rewards.{name}:score"
    for name in (
        "math", "dapo_math", "boxed", "geo3k", "exact", "numeric", "choice", "address", "json_call", "maze",
        "reasoning_gym", "overlong", "format",
    )
}  # fmt: skip

_GIVEN = ("answer", "prompt")
_PLACES = {
    "response": 0, "responses": 0, "answer": 1, "prompt": 2,
    "solution_str": 0, "ground_truth": 1, "data_source": None,  # verl's
    "completion": 0, "completions": 0, "prompts": None,  # TRL's
}  # fmt: skip
"""Names that say what a parameter is -> where it belongs; None: nowhere."""
_SIGNATURE = (
    "it must take (response, answer, prompt), or (responses, answer, prompt) for all responses to a prompt at once"
)


@dataclass(frozen=True, slots=True)
class Verifier:
    """A reward function with its options, ready to be called."""

    name: str
    function: Callable[..., Any]
    batch: bool
    """Takes all responses to a prompt at once."""
    asynchronous: bool
    counts_tokens: bool
    """Has a parameter `tokens`."""


def load_verifier(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """Raises `UserError`. Modules in the working directory are found too."""
    module_name, colon, function_name = BUILT_IN.get(name, name).partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"reward {name}: write {', '.join(BUILT_IN)} or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there hides an installed module
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"reward {name}: cannot import {module_name} ({reason})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward {name}: {module_name} has no function {function_name}")
    return _checked(name, function, dict(options or {}))


def _checked(name: str, function: Callable[..., Any], options: dict[str, Any]) -> Verifier:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(f"reward {name}: its signature cannot be read; {_SIGNATURE}") from None
    first = next(iter(signature.parameters), "")
    counts = "tokens" in signature.parameters
    taken = {first, *_GIVEN, *(["tokens"] if counts else [])} & set(options)
    if taken:
        raise UserError(f"reward.options.{name}: {', '.join(sorted(taken))} is given with each response; remove it")
    try:
        signature.bind("response", "answer", "prompt", **options, **({"tokens": 1} if counts else {}))
    except TypeError as error:
        known = [parameter for parameter in signature.parameters if parameter not in (first, *_GIVEN, "tokens")]
        there = f"; its options are {', '.join(known)}" if known else ""
        raise UserError(f"reward {name}: {_SIGNATURE}, and its options by name ({error}){there}") from None
    for place, parameter in enumerate(list(signature.parameters)[:3]):
        if _PLACES.get(parameter, place) != place:
            raise UserError(
                f"reward {name}: its parameter {place + 1} is {parameter}, but what it gets there is the "
                f"{('response', *_GIVEN)[place]}: put (response, answer, prompt) in this order, by a function of your "
                "own around it if it is another library's"
            )
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - not whether it can be called: whether that is `async def`
    )
    return Verifier(name, partial(function, **options), first == "responses", asynchronous, counts)
