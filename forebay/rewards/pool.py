"""Reward workers: processes that decode and score one group at a time, and are killed when they hang.

Invariants:
- Nothing that a reward function does (hang, exit, raise, return rubbish) stops the run: its group fails with a reason.
- At most `workers` groups are with the workers at a time, so each one's time limit starts when it is handed over.
- The event loop is never blocked; a worker whose parent is gone ends by itself within a second.
"""

import asyncio
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pebble import ProcessExpired, ProcessPool

from forebay.errors import DataError, RunError, UserError
from forebay.rewards import Reward, load_reward

STARTUP_S = 120.0
"""Longest start of a worker, the import of the user's module included."""
_CLOSE_S = 10.0

Scored = tuple[Literal["rewards"], list[float]] | tuple[Literal["row", "setup"], str]


class RewardPool:
    """Scores groups with the reward `name`; `tokenizer_dir` is a Hugging Face model folder."""

    def __init__(
        self,
        name: str,
        tokenizer_dir: Path,
        workers: int,
        timeout_s: float,
        truncated: Literal["zero", "score"] = "zero",
    ) -> None:
        self.timeouts = 0
        """Groups that failed because their time was over."""
        self._name, self._workers, self._timeout_s = name, workers, timeout_s
        self._setup = (name, str(tokenizer_dir), truncated, os.getpid())
        self._room = asyncio.Semaphore(workers)
        self._pool = self._start()

    async def score(
        self, responses: Sequence[tuple[Sequence[int], bool]], answer_json: str, prompt: str
    ) -> list[float]:
        """Rewards of one group's responses, each (token ids, finished), in order.

        Raises `DataError` if the function raises, takes too long, ends its process or returns no finite number;
        `UserError` if the function or the tokenizer cannot be loaded; `RunError` if no worker can be had.
        """
        plain = [(list(map(int, ids)), bool(finished)) for ids, finished in responses]
        async with self._room:
            kind, value = await self._once_more_if_it_dies(plain, answer_json, prompt)
        if kind == "rewards":
            return value  # type: ignore[return-value]
        raise (UserError if kind == "setup" else DataError)(str(value))

    def close(self) -> None:
        """Kill the workers; returns when they are gone. May be called twice."""
        _end(self._pool)

    async def _once_more_if_it_dies(self, *task: object) -> Scored:
        for _ in range(2):
            pool = self._pool
            try:
                return await self._run(pool, task)
            except ProcessExpired:
                continue
            except BrokenProcessPool:  # pebble's word for a worker that died before it said what it works on
                if self._pool is pool:
                    self._pool = self._start()
                    await asyncio.to_thread(_end, pool)
        raise DataError(f"reward {self._name}: its process ended twice while scoring this group")

    async def _run(self, pool: ProcessPool, task: tuple[object, ...]) -> Scored:
        try:
            future = pool.schedule(_score_group, args=task, timeout=self._timeout_s)
        except RuntimeError as error:
            raise RunError(f"the reward workers ({self._name}) are stopped: {error}") from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), STARTUP_S + self._timeout_s)
        except TimeoutError:
            if future.cancelled():
                raise RunError(
                    f"no reward worker took a group within {STARTUP_S:.0f} s: does importing {self._name} hang?"
                ) from None
            self.timeouts += 1
            raise DataError(
                f"reward {self._name} took longer than reward.timeout_s ({self._timeout_s:g} s) for one group"
            ) from None

    def _start(self) -> ProcessPool:
        # A spawned process shares nothing with us: no threads, locks, sockets or GPU state.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self._workers, initializer=_set_up, initargs=self._setup, context=context)
        pool.schedule(os.getpid)  # starts the workers now, while the engines start
        return pool


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join(_CLOSE_S)


@dataclass(frozen=True)
class _Worker:
    """What a worker process keeps between groups."""

    reward: Reward
    decode: Callable[[list[int]], str]
    score_truncated: bool


_worker: _Worker | str = "no reward is loaded"
"""In a worker process; a text says why there is none."""


def _set_up(name: str, tokenizer_dir: str, truncated: str, parent: int) -> None:
    global _worker
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        _worker = _Worker(load_reward(name), _load_decoder(tokenizer_dir), truncated == "score")
    except Exception as error:  # noqa: BLE001 - raised here it would only break the pool; told with the first group
        _worker = str(error) or type(error).__name__


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _load_decoder(tokenizer_dir: str) -> Callable[[list[int]], str]:
    file = Path(tokenizer_dir) / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    if not file.with_name("tokenizer_config.json").exists():
        raise UserError(f"{tokenizer_dir}: no tokenizer in this folder")
    from transformers import AutoTokenizer  # slow to import; only for models without tokenizer.json

    slow = AutoTokenizer.from_pretrained(tokenizer_dir)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=True))


def _score_group(responses: list[tuple[list[int], bool]], answer_json: str, prompt: str) -> Scored:
    if isinstance(_worker, str):
        return "setup", _worker
    answer = json.loads(answer_json)
    rewards = []
    for ids, finished in responses:
        if not finished and not _worker.score_truncated:
            rewards.append(0.0)
            continue
        try:
            reward = float(_worker.reward(_worker.decode(ids), answer, prompt))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's and may raise anything
            return "row", f"the reward function raised {type(error).__name__}: {error}".splitlines()[0]
        if not math.isfinite(reward):
            return "row", f"the reward function returned {reward}, not a finite number"
        rewards.append(reward)
    return "rewards", rewards
