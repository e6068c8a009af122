"""Rewards by name: `maze`, `math`, `exact`, or the user's own `package.module:function`.

Invariants:
- A reward is a function of (response text, answer, prompt text) and nothing else; the answer is what the row's JSON
  decodes to. It returns a finite number.
- Rewards run in `forebay.rewards.pool`, in processes that can be killed.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from forebay.errors import UserError

Reward = Callable[[str, Any, str], float]

BUILT_IN = {
    "maze": "forebay.rewards.maze:score",
    "math": "forebay.rewards.math:score",
    "exact": "forebay.rewards.exact:score",
}


def load_reward(name: str) -> Reward:
    """The reward function of that name; raises `UserError`. Modules in the working directory are found too."""
    module_name, colon, function_name = BUILT_IN.get(name, name).partition(":")
    if not (colon and module_name and function_name):
        raise UserError(f"reward.name {name}: write {', '.join(BUILT_IN)} or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there hides an installed module
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"reward.name {name}: cannot import {module_name} ({reason})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward.name {name}: {module_name} has no function {function_name}")
    try:
        inspect.signature(function).bind("response", "answer", "prompt")
    except TypeError as error:
        raise UserError(
            f"reward.name {name}: must take (response, answer, prompt) and return a number ({error})"
        ) from None
    return function  # type: ignore[no-any-return]
