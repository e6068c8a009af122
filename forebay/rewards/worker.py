"""A reward worker: the process that decodes and judges, and the handle that its parent has on it.

Invariants:
- The worker sends `ready` or `broken` once; then for each group `together` (whether its responses are judged at the
  same time), and one judgement for each response as soon as it is there.
- The parent waits `timeout_s` for the next response (if `together`, for all of them), then kills the worker with all
  its children and goes on with the other responses in a new one.
- A worker whose parent is gone ends within a second, whatever it does; its own children, unless C code keeps it.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forebay.config import RewardConfig
from forebay.errors import RunError, UserError
from forebay.launch.guard import PR_SET_PDEATHSIG, prctl
from forebay.launch.main_script import AGAIN, WORKER, unguarded
from forebay.rewards.composition import Composition, Group, Response, judge_group, together
from forebay.rewards.judgement import Judgement, failed, timed_out

STARTUP_S = 120.0
"""Longest start of a worker, the import of the user's module included."""
_CLOSE_S = 10.0
_DEATHS = 2
"""Times that a worker may die of the same response, or at its start."""

Ids = tuple[list[int], bool]
"""A response as token ids, and whether it is finished."""


@dataclass(frozen=True)
class Setup:
    """What a worker is made for."""

    reward: RewardConfig
    tokenizer_dir: str
    budget: int
    parent: int


@dataclass(frozen=True)
class Task:
    """One group."""

    responses: list[Ids]
    answer_json: str
    prompt: str
    verifier: str


class Worker:
    """One place in the pool: a process, replaced when it dies. Its methods block; one thread at a time uses it."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._timeout_s = setup, setup.reward.timeout_s
        self._lock = threading.Lock()
        self._closed = self._is_ready = False
        self._start()

    def judge(self, task: Task) -> list[Judgement]:
        """One judgement for each response. Raises `UserError` if the verifier or the tokenizer cannot be loaded,
        `RunError` if no process can be had."""
        judged: dict[int, Judgement] = {}
        deaths = 0
        while len(judged) < len(task.responses):
            left = [place for place in range(len(task.responses)) if place not in judged]
            begun = all_at_once = False
            verdict: Judgement | None
            self._be_ready()
            try:
                for place, judgement in self._messages(task, left):
                    begun = True
                    if place is None:
                        all_at_once = judgement
                    else:
                        judged[place], deaths = judgement, 0
                continue
            except TimeoutError:
                verdict = timed_out(f"longer than reward.timeout_s ({self._timeout_s:g} s)")
                if not begun:  # it is the process that hangs, or the import of this task's verifier
                    deaths += 1
                    all_at_once = True
                    verdict = timed_out(f"not begun within {STARTUP_S:g} s, twice") if deaths == _DEATHS else None
            except (EOFError, OSError):
                deaths += 1
                verdict = failed("its process ended twice while judging this response") if deaths == _DEATHS else None
            self._end()
            if verdict is not None:
                culprits = [place for place in left if place not in judged]
                judged |= dict.fromkeys(culprits if all_at_once else culprits[:1], verdict)
                deaths = 0
        return [judged[place] for place in range(len(task.responses))]

    def close(self) -> None:
        """Kill the process; what is waited for raises `RunError`. May be called twice and from any thread."""
        with self._lock:
            self._closed = True
        self._end()

    def _messages(self, task: Task, left: Sequence[int]) -> Iterator[tuple[int | None, Any]]:
        """(None, whether all at once), then (place, judgement). Raises `TimeoutError`, `EOFError`, `OSError`."""
        responses = [task.responses[place] for place in left]
        self._send((responses, task.answer_json, task.prompt, task.verifier))
        all_at_once = self._receive(time.monotonic() + STARTUP_S)  # a row's verifier may have to be imported
        yield None, all_at_once
        deadline = time.monotonic() + self._timeout_s
        for _ in left:
            place, score, verdict, reason = self._receive(deadline)
            yield left[place], Judgement(score, verdict, reason)
            if not all_at_once:
                deadline = time.monotonic() + self._timeout_s

    def _send(self, message: Any) -> None:
        """Raises `OSError` if the process ends meanwhile; it is killed if it does not take a long message in time."""
        killer = threading.Timer(self._timeout_s, self._kill)
        killer.start()
        try:
            self._pipe.send(message)
        finally:
            killer.cancel()

    def _receive(self, deadline: float) -> Any:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return self._pipe.recv()

    def _be_ready(self) -> None:
        name = self._setup.reward.name
        for _ in range(_DEATHS):
            if not self._process.is_alive():
                self._end()
                self._start()
            if self._is_ready:
                return
            try:
                kind, text = self._receive(time.monotonic() + STARTUP_S)
            except TimeoutError:
                self._end()
                raise RunError(
                    f"no reward worker was ready within {STARTUP_S:.0f} s: does importing {name} hang?"
                ) from None
            except (EOFError, OSError):
                self._end()
                if self._process.exitcode == AGAIN:
                    raise unguarded() from None
                continue
            if kind == "broken":
                raise UserError(text)
            self._is_ready = True
            return
        raise RunError(f"the reward workers ({name}) end while they start: does importing it end the process?")

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise RunError(f"the reward workers ({self._setup.reward.name}) are stopped")
            # A spawned process shares nothing with us: no threads, locks, sockets or GPU state.
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._setup), name=WORKER, daemon=True)
            process.start()
            self._process = process  # one that runs: a process without a pid must not be killed
            theirs.close()
            self._is_ready = False

    def _end(self) -> None:
        """Kill the process and its children; returns when it is gone."""
        self._kill()
        self._process.join(_CLOSE_S)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # before it has made its own group, or after its end
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()


def serve(pipe: Connection, setup: Setup) -> None:
    """The worker process's life."""
    os.setpgid(0, 0)  # so that a verifier's own children end with it
    # Ends it even in C code that lets no thread run. It follows the parent's thread that has started us, which outlives
    # us: the pool's owner or one of the pool's threads.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(setup.parent,), daemon=True).start()
    try:
        composition, decode = Composition(setup.reward, setup.budget), load_decoder(setup.tokenizer_dir)
    except Exception as error:  # noqa: BLE001 - raised here it would only end the process; the parent tells it
        pipe.send(("broken", str(error) or type(error).__name__))
        return
    pipe.send(("ready", ""))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has closed its end
        while True:
            _judge(pipe, composition, decode, setup.reward.truncated == "score", *pipe.recv())


def _judge(
    pipe: Connection,
    composition: Composition,
    decode: Callable[[list[int]], str],
    score_truncated: bool,
    responses: list[Ids],
    answer_json: str,
    prompt: str,
    verifier: str,
) -> None:
    def emit(place: int, judgement: Judgement) -> None:
        pipe.send((place, judgement.score, judgement.verdict, judgement.reason))

    try:
        terms = composition.terms(verifier)
    except UserError as error:  # the row's fault
        pipe.send(True)
        for place in range(len(responses)):
            emit(place, failed(str(error)))
        return
    pipe.send(together(terms))
    texts = [Response(decode(ids), len(ids), finished) for ids, finished in responses]
    judge_group(terms, Group(texts, json.loads(answer_json), prompt, score_truncated), emit)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def load_decoder(tokenizer_dir: str) -> Callable[[list[int]], str]:
    """Token ids to text, without special tokens. Raises `UserError`."""
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
