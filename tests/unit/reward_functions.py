"""Rewards of all tempers, loaded by name into the workers of test_reward_pool.py."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forebay.rewards import Judgement


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def trl(prompts: list[str], completions: list[str], answer: list[Any]) -> list[float]:
    return [1.0] * len(completions)


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
    if prompt.startswith("child "):
        child = subprocess.Popen(["sleep", "100"])
        Path(prompt.removeprefix("child ")).write_text(str(child.pid))
        child.wait()
    return {"nan": float("nan"), "inf": float("inf")}.get(prompt, 1.0)


def as_it_says(response: str, answer: Any, prompt: str) -> float:
    """a1 is right, a1a1 hangs, b1 ends the process, anything else is wrong."""
    if response == "a1a1":
        time.sleep(100)
    if response == "b1":
        os._exit(3)
    return float(response == "a1")


def batch(responses: list[str], answer: Any, prompt: str) -> list[float]:
    return [len(response) + answer["plus"] for response in responses]


async def async_single(response: str, answer: Any, prompt: str) -> float:
    await asyncio.sleep(100 if answer.get("sleep") == response else 0.01)
    return float(len(response) + answer["plus"])


async def async_batch(responses: list[str], answer: Any, prompt: str) -> list[Judgement]:
    await asyncio.sleep(0.01)
    return [Judgement(len(response) + answer["plus"], "partial", "by length") for response in responses]


def with_options(response: str, answer: Any, prompt: str, *, limit: int, tokens: int, unit: str = "s") -> float:
    return float(tokens < limit)


def two(response: str, answer: Any) -> float:
    return 0.0


not_a_function = 3
