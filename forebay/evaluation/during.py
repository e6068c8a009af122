"""Held-out prompts answered by chosen versions while training goes on.

Invariants:
- Every token of an examination is the examined version's: until its answers are there, its engine takes no newer
  weights; it goes on generating for the trainer, and so do all the others.
- An examination never ends or delays a run for longer than its own deadline; one that could not be finished says why.
- Its rewards count nowhere else: neither in the training's verdicts nor in its ledger.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from forebay.config import RunConfig
from forebay.control.types import EngineFailure, Sample
from forebay.data.schema import Row
from forebay.errors import DataError

AT_ONCE = 16
"""Prompts of an examination that are with its engine at the same time: the other slots stay with the training."""


class Engine(Protocol):
    """What an examination needs of an engine."""

    async def greedy(self, prompt_ids: Sequence[int], max_tokens: int, images: Sequence[str] = ()) -> Sample: ...


class Scorer(Protocol):
    """What it needs of the reward workers; raises `DataError` for one bad row."""

    async def score(
        self,
        responses: Sequence[tuple[Sequence[int], bool]],
        answer_json: str,
        prompt: str,
        verifier: str = "",
        *,
        counted: bool = True,
    ) -> list[float]: ...


class HeldOut:
    """Examines each version that `every` divides, once, on the first engine that has it; version 0 too."""

    def __init__(
        self,
        rows: Sequence[Row],
        config: RunConfig,
        engines: Sequence[Engine],
        scorer: Scorer,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._rows, self._config, self._engines, self._scorer, self._tell = rows, config, engines, scorer, tell
        self._seen: set[int] = set()

    def is_due(self, version: int) -> bool:
        """Whether this version is still to be examined; from then on it counts as examined."""
        every = self._config.evaluation.every_versions
        if not every or not self._rows or version % every or version in self._seen:
            return False
        self._seen.add(version)
        return True

    async def examine(self, index: int, version: int) -> None:
        """Greedy answers of engine `index`, which serves `version` until this returns; the result is told."""
        begin, limit = time.monotonic(), self._config.evaluation.timeout_s
        told: dict[str, Any] = {"version": version, "engine": index}
        places = asyncio.Semaphore(AT_ONCE)
        answers = [asyncio.ensure_future(self._answer(index, version, row, places)) for row in self._rows]
        try:
            async with asyncio.timeout(limit):
                found = await asyncio.gather(*answers)
        except TimeoutError:
            told["given_up"] = f"not done within {limit:g} s (evaluation.timeout_s)"
        except EngineFailure as failure:
            told["given_up"] = str(failure)
        except asyncio.CancelledError:
            self._tell(told | {"given_up": "the run ended before", "seconds": time.monotonic() - begin})
            raise
        else:
            rewards = [reward for reward, _ in found if reward is not None]
            told |= {
                "prompts": len(rewards),
                "left_out": len(found) - len(rewards),
                "reward_mean": math.fsum(rewards) / len(rewards) if rewards else None,
                "tokens": sum(tokens for _, tokens in found),
            }
        finally:
            for answer in answers:  # else they would go on asking an engine that has failed, and the one after it
                answer.cancel()
        self._tell(told | {"seconds": time.monotonic() - begin})

    async def _answer(self, index: int, version: int, row: Row, places: asyncio.Semaphore) -> tuple[float | None, int]:
        """(Reward or None, response tokens)."""
        config = self._config
        most = min(config.generation.max_new_tokens, config.model.max_model_len - len(row.prompt_ids))
        tokens = 0
        async with places:
            try:
                sample = await self._engines[index].greedy(row.prompt_ids, most, row.images)
                tokens = len(sample.ids)
                if found := {span.version for span in sample.versions} - {version}:
                    raise EngineFailure(f"engine {index} answered with version {min(found)}, not {version}")
                finished = sample.finish_reason == "stop"
                (reward,) = await self._scorer.score(
                    [(sample.ids, finished)], row.answer, row.prompt, row.verifier, counted=False
                )
            except DataError:
                return None, tokens
        return reward, tokens
