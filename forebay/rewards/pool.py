"""Reward workers: processes that score one group at a time, and are killed when one response takes too long.

Invariants:
- Nothing that a verifier does (hang, exit, raise, return rubbish) stops the run: the response has `failed` or
  `timed_out`, with a reason, and its group fails. The other responses are judged all the same.
- At most `reward.workers` groups are with the workers at a time, so each limit starts when a response is handed over.
- The event loop is never blocked: a thread for each worker waits in its stead.
"""

import asyncio
import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forebay.config import RewardConfig
from forebay.errors import DataError, RunError
from forebay.launch.main_script import require_guard
from forebay.rewards.judgement import Judgement
from forebay.rewards.tally import Tally
from forebay.rewards.worker import Setup, Task, Worker


class RewardPool:
    """Scores groups as `reward` says; `tokenizer_dir` is a Hugging Face model folder, `budget` the response tokens
    allowed. The workers start at once, while the engines do. Raises `UserError` for a main script that they must not
    run again."""

    def __init__(self, reward: RewardConfig, tokenizer_dir: Path, budget: int, tally: Tally | None = None) -> None:
        require_guard()
        self.tally = Tally() if tally is None else tally
        self._name = reward.name
        setup = Setup(reward, str(tokenizer_dir), budget, os.getpid())
        self._workers = [Worker(setup) for _ in range(reward.workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="rewards")

    async def score(
        self,
        responses: Sequence[tuple[Sequence[int], bool]],
        answer_json: str,
        prompt: str,
        verifier: str = "",
        *,
        counted: bool = True,
    ) -> list[float]:
        """Scores of one group's responses, each (token ids, finished), in order. `verifier`: the row's own, if any.

        Raises `DataError` if one of them failed or timed out; otherwise as `judge`.
        """
        judged = await self.judge(responses, answer_json, prompt, verifier, counted=counted)
        for number, judgement in enumerate(judged, 1):
            if judgement.score is None:
                which = f"response {number} of {len(judged)}: " if len(judged) > 1 else ""
                raise DataError(f"reward {verifier or self._name}: {which}{judgement.verdict}, {judgement.reason}")
        return [judgement.score for judgement in judged if judgement.score is not None]

    async def judge(
        self,
        responses: Sequence[tuple[Sequence[int], bool]],
        answer_json: str,
        prompt: str,
        verifier: str = "",
        *,
        counted: bool = True,
    ) -> list[Judgement]:
        """Judgements of one group's responses, in order; unless not `counted`, they are counted in `tally`.

        Raises `UserError` if the verifier or the tokenizer cannot be loaded; `RunError` if no worker can be had.
        """
        plain = [(list(map(int, ids)), bool(finished)) for ids, finished in responses]
        try:
            future = self._threads.submit(self._judge, Task(plain, answer_json, prompt, verifier))
        except RuntimeError as error:
            raise RunError(f"the reward workers ({self._name}) are stopped: {error}") from None
        judged = await asyncio.wrap_future(future)
        if counted:
            self.tally.add(judged)
        return judged

    def close(self) -> None:
        """Kill the workers; returns when they are gone. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)

    def _judge(self, task: Task) -> list[Judgement]:
        worker = self._idle.get()  # there are as many threads as workers, so there is one
        try:
            return worker.judge(task)
        finally:
            self._idle.put(worker)
