"""Profile: the start model answers a part of the training prompts, spread evenly over prompt lengths.

Invariants:
- What was answered is kept, however the run ends; only the rest is asked, and with nothing to ask no engine starts.
- An answer depends on its prompt, the model, the sampling settings and the seed, not on which others are asked.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.config import LengthsConfig, RunConfig
from forebay.control.types import NOTHING, RequestRefused, Sample
from forebay.data.counted import counted
from forebay.errors import RunError, UserError
from forebay.generation.client import VllmEngine
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.lengths.answers import Answer, Answers, greedy_answers, model_digest, prompt_key, sampled_answers
from forebay.lengths.prompts import Indices, Observed, Prompts, Vector, observe, read_images
from forebay.run import RunContext

log = logging.getLogger("forebay.lengths")
log.setLevel(logging.INFO)

PROGRESS_S = 30.0
ATTEMPTS = 3
"""Times that one prompt is tried after engine failures."""
LEAST, FIRST, MOST = 4, 64, 512
"""Answered prompts without which nothing is fitted; size of the first round and of the largest profile where
`target_error` decides."""


Greedy = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Profile:
    """What the start model answered."""

    prompts: Prompts
    """All training prompts, with greedy responses where they were asked for."""
    index: Indices
    """Of the profiled prompts; any first part of them is spread over prompt lengths."""
    observed: Observed
    """Their responses, in the same order."""
    asked: int
    """Responses generated now; 0: all came from the cache and no engine was started."""
    refused: int
    """Prompts that no engine takes."""
    greedy: bool
    """Whether every prompt has its greedy response."""


def measure(run: RunContext, prompts: Prompts, greedy: Greedy) -> Profile:
    """Profile and, as `greedy` says, one greedy response to every training prompt (`auto`: unless that is more
    responses than the profile has; see `Profile.greedy`). Raises `UserError` if there are fewer than `LEAST` prompts
    and `RunError` if fewer were answered."""
    return asyncio.run(_measure(run, prompts, greedy))


def sample_order(sizes: Indices, seed: int) -> Indices:
    """All prompts in an order of which every first part is stratified by prompt length.

    Ranks by (length, chance) are visited in the order of the binary van der Corput sequence, shifted by chance: its
    first 2^k members have one in each of 2^k equal strata.
    """
    rng = np.random.default_rng(seed)
    count = len(sizes)
    ranked = np.lexsort((rng.random(count), sizes))
    bits = max(1, (count - 1).bit_length())
    number, visited = np.arange(2**bits), np.zeros(2**bits, dtype=np.int64)
    for bit in range(bits):
        visited |= ((number >> bit) & 1) << (bits - 1 - bit)
    visited ^= int(rng.integers(2**bits))
    return np.asarray(ranked[visited[visited < count]], dtype=np.int64)


def profile_size(config: LengthsConfig, prompts: int) -> int:
    """Prompts to profile at most: half of them unless there are fewer than eight."""
    wanted = config.profile_prompts or MOST
    return min(wanted, max(prompts // 2, min(prompts, 4)))


def needed(means: Vector, target_error: float) -> int:
    """Prompts for which the 95% confidence interval of the mean length has this half width, relative to the mean, going
    by the mean lengths of some prompts: (1.96 sd / (error mean))^2, as for a plain random sample; a stratified one is
    never worse."""
    if len(means) < 2:
        return FIRST
    return math.ceil((1.96 * float(np.std(means, ddof=1)) / (target_error * float(np.mean(means)))) ** 2)


async def _measure(run: RunContext, prompts: Prompts, greedy: Greedy) -> Profile:
    config = run.config
    if len(prompts) < LEAST:
        has = counted(len(prompts), "prompt")
        raise UserError(f"lengths: the training split has {has}, {LEAST} are needed: give more data")
    order = sample_order(prompts.sizes, config.seed)[: profile_size(config.lengths, len(prompts))]
    model = await asyncio.to_thread(model_digest, run.start_model.resolve())
    async with AsyncExitStack() as stack:
        ask = _Ask(run, stack)
        with sampled_answers(run.cache, config, model) as known:
            taken = await _rounds(ask, prompts, order, known)
            answers = [known.get(ask.question(prompts, i).key) for i in taken]
        found = [(i, answer) for i, answer in zip(taken, answers, strict=True) if answer and answer.lengths]
        if len(found) < LEAST:
            raise RunError(
                f"lengths: only {len(found)} of {len(taken)} profiled prompts were answered, {LEAST} are needed; "
                f"the engines refused the others: see {run.logs}"
            )
        affordable = len(prompts) <= len(found) * config.lengths.samples
        with_greedy = greedy == "always" or (greedy == "auto" and affordable)
        if with_greedy:
            with greedy_answers(run.cache, config, model) as known:
                await ask.all(range(len(prompts)), prompts, known, _greedy, 1)
                prompts = _with_greedy(ask, prompts, known)
    return Profile(
        prompts=prompts,
        index=np.array([i for i, _ in found], dtype=np.int64),
        observed=observe([(answer.lengths, answer.truncated) for _, answer in found]),
        asked=ask.responses,
        refused=len(taken) - len(found),
        greedy=with_greedy,
    )


async def _rounds(ask: "_Ask", prompts: Prompts, order: Indices, known: Answers) -> list[int]:
    """Ask until the profile is large enough; the prompts that it holds then."""
    lengths = ask.config.lengths
    count = len(order) if lengths.profile_prompts else min(FIRST, len(order))
    while True:
        taken = [int(i) for i in order[:count]]
        await ask.all(taken, prompts, known, _sampled, lengths.samples)
        if count == len(order):
            return taken
        answers = [known.get(ask.question(prompts, i).key) for i in taken]
        means = np.array([np.mean(answer.lengths) for answer in answers if answer and answer.lengths])
        wanted = min(needed(means, lengths.target_error), len(order))
        if wanted <= count:
            return taken
        count = wanted


class Question(NamedTuple):
    """A prompt as an engine is asked it."""

    tokens: list[int]
    images: tuple[str, ...]

    @property
    def key(self) -> str:
        return prompt_key(self.tokens, self.images)


Way = Callable[[RunConfig, VllmEngine, Question], Coroutine[Any, Any, list[Sample]]]


async def _sampled(config: RunConfig, engine: VllmEngine, question: Question) -> list[Sample]:
    seed = config.seed * 1_000_003 + int(question.key[:8], 16)
    return await engine.generate(question.tokens, [NOTHING] * config.lengths.samples, seed, images=question.images)


async def _greedy(config: RunConfig, engine: VllmEngine, question: Question) -> list[Sample]:
    return [await engine.greedy(question.tokens, config.generation.max_new_tokens, question.images)]


class _Ask:
    """Asks what is not known; starts the engines when the first question comes."""

    def __init__(self, run: RunContext, stack: AsyncExitStack) -> None:
        self.config = run.config
        self.responses = 0
        self._run, self._stack = run, stack
        self._fleet: Fleet | None = None
        self._images = read_images(run.data / "train.parquet")

    def question(self, prompts: Prompts, index: int) -> Question:
        """The prompt at `index`."""
        return Question(prompts.tokens_of(index), self._images.get(prompts.ids[index], ()))

    async def all(self, index: Sequence[int], prompts: Prompts, known: Answers, way: Way, responses: int) -> None:
        """Answers to these prompts into `known`. `responses`: of one question; so many that an engine is full and
        has the next ones waiting, no more, since each has the time-out of a request."""
        questions = {question.key: question for question in (self.question(prompts, i) for i in index)}
        missing = {key: question for key, question in questions.items() if known.get(key) is None}
        if not missing:
            return
        if self._fleet is None:
            fleet = Fleet(self._run, self._run.start_model, plan_cores(self.config))
            self._fleet = await self._stack.enter_async_context(fleet)
        engines = len(self._fleet.engines)
        room = -(-2 * self.config.concurrent_samples // responses)
        slots = [asyncio.Semaphore(room) for _ in range(engines)]
        told, done = time.monotonic(), 0

        async def one(place: int, key: str, question: Question) -> None:
            nonlocal told, done
            async with slots[place % engines]:
                known.add(key, await self._answer(place % engines, question, way))
            done += 1
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                log.info("  %d of %d prompts answered", done, len(missing))

        jobs = [asyncio.create_task(one(i, *item)) for i, item in enumerate(missing.items())]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _answer(self, engine: int, question: Question, way: Way) -> Answer:
        """Empty if no engine takes the prompt. Raises `RunError` after `ATTEMPTS`."""
        assert self._fleet is not None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if attempt > 1:
                    await self._fleet.revive(engine)
                samples = await way(self.config, self._fleet.engines[engine], question)
            except RequestRefused:
                break
            except RunError:  # of the engine, or of its restart: it may die while it starts, too
                if attempt == ATTEMPTS:
                    raise
                continue
            self.responses += len(samples)
            return Answer(
                lengths=tuple(len(sample.ids) for sample in samples),
                truncated=tuple(sample.finish_reason == "length" for sample in samples),
                logprobs=tuple(math.fsum(sample.logprobs) for sample in samples),
            )
        return Answer((), (), ())


def _with_greedy(ask: _Ask, prompts: Prompts, known: Answers) -> Prompts:
    answers = [known.get(ask.question(prompts, i).key) for i in range(len(prompts))]
    tokens = [answer.lengths[0] if answer and answer.lengths else math.nan for answer in answers]
    logprob = [answer.logprobs[0] if answer and answer.lengths else math.nan for answer in answers]
    return prompts.with_greedy(np.array(tokens), np.array(logprob))
