"""Rewards of all tempers, loaded by name into the workers of test_reward_pool.py."""

import os
import sys
import time
from pathlib import Path
from typing import Any


def length(response: str, answer: Any, prompt: str) -> float:
    return float(len(response) + answer["plus"] + len(prompt))


def moody(response: str, answer: Any, prompt: str) -> float:
    """Does what the prompt says."""
    if prompt == "hang":
        while True:
            time.sleep(0.1)
    if prompt == "hang in C":
        "a".ljust(10**9).find("b")
        sum(range(10**12))
    if prompt == "die":
        os._exit(3)
    if prompt == "exit":
        sys.exit(3)
    if prompt == "raise":
        raise KeyError("no such thing\nat all")
    if prompt == "text":
        return "much"  # type: ignore[return-value]
    if prompt.startswith("die once "):
        mark = Path(prompt.removeprefix("die once "))
        if not mark.exists():
            mark.touch()
            os._exit(3)
    return {"nan": float("nan"), "inf": float("inf")}.get(prompt, 1.0)


def two(response: str, answer: Any) -> float:
    return 0.0


not_a_function = 3
