"""`Examiner`: puts prompts to a fleet and scores the answers, whatever happens to the engines meanwhile.

Invariants:
- An answer counts only if every token came from the model that was asked; otherwise it is asked again.
- An engine's failure is tried again, on the next free engine or after a restart, and never becomes a reward.
- Every wait ends at `evaluation.timeout_s`, with a message that counts who was waited for.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from forebay.config import RunConfig
from forebay.control.types import EngineFailure, RefreshMode, RefreshRecord, Sample, Snapshot
from forebay.data.schema import Row
from forebay.errors import DataError, DeadlineError, ForebayError, RunError

_ATTEMPTS = 4
"""Tries for one prompt: an engine's death costs every prompt on it one."""
_RETRY_PAUSE_S = 0.2


class ExaminedEngine(Protocol):
    """What the examination needs of an engine."""

    async def respond(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        images: Sequence[str],
        count: int,
        temperature: float,
        seed: int,
    ) -> list[Sample]: ...

    async def refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord: ...

    async def health(self) -> None: ...


class Engines(Protocol):
    """What the examination needs of the fleet."""

    @property
    def engines(self) -> Sequence[ExaminedEngine]: ...

    def alive(self, i: int) -> bool: ...

    async def restart(self, i: int) -> None: ...


class Scorer(Protocol):
    """What the examination needs of the reward workers; raises `DataError` for one bad row, `RunError` if broken."""

    async def score(
        self, responses: Sequence[tuple[Sequence[int], bool]], answer_json: str, prompt: str, verifier: str
    ) -> list[float]: ...


@dataclass(frozen=True)
class Answer:
    """One model's `evaluation.samples` responses to one prompt. `rewards` are None if one of them could not be had, for
    `reason`."""

    samples: Sequence[Sample]
    rewards: Sequence[float] | None
    reason: str = ""

    @property
    def reward(self) -> float | None:
        """The mean: avg@k."""
        return None if self.rewards is None else math.fsum(self.rewards) / len(self.rewards)


class Examiner:
    """Examines one model after another on the same engines; starts with the model that the fleet was started on."""

    def __init__(self, fleet: Engines, scorer: Scorer, config: RunConfig) -> None:
        self._fleet = fleet
        self._scorer = scorer
        self._config = config
        self._snapshot: Snapshot | None = None
        self._repairs = [asyncio.Lock() for _ in fleet.engines]
        self._restarts_left = config.generation.max_restarts
        self._waiting: Counter[str] = Counter()

    async def load(self, snapshot: Snapshot) -> None:
        """Put other weights into every engine, in place."""
        self._snapshot = snapshot
        for i in range(len(self._fleet.engines)):
            for attempt in range(_ATTEMPTS):
                try:
                    await self._fleet.engines[i].refresh(snapshot, "retract")
                    break
                except EngineFailure as error:
                    if attempt + 1 == _ATTEMPTS:
                        raise RunError(f"evaluation: engine {i} does not load the trained model: {error}") from None
                    if await self._repair(i, error):
                        break

    async def answer_all(self, rows: Sequence[Row], who: str) -> list[Answer]:
        """One answer for each row, in order; the same seeds whoever is asked. `who` names the model.

        Raises `DeadlineError` and `RunError`.
        """
        answers: list[Answer | None] = [None] * len(rows)
        todo = deque(range(len(rows)))
        attempts: Counter[int] = Counter()
        slots = min(self._config.generation.max_num_seqs, -(-len(rows) // len(self._fleet.engines)))
        workers = [
            asyncio.create_task(self._work(i, rows, todo, attempts, answers))
            for _ in range(slots)
            for i in range(len(self._fleet.engines))
        ]
        limit = self._config.evaluation.timeout_s
        try:
            async with asyncio.timeout(limit) as timer:
                await asyncio.gather(*workers)
        except TimeoutError:
            if not timer.expired():
                raise
            done = len(rows) - answers.count(None)
            waits = ", ".join(f"{count} on {name}" for name, count in self._waiting.most_common() if count) or "nobody"
            raise DeadlineError(
                f"evaluation of the {who}: {done} of {len(rows)} prompts were done after {limit:g} s "
                f"(evaluation.timeout_s), waiting: {waits}; raise the limit or lower evaluation.prompts"
            ) from None
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [answer for answer in answers if answer is not None]

    async def _work(
        self, i: int, rows: Sequence[Row], todo: deque[int], attempts: Counter[int], answers: list[Answer | None]
    ) -> None:
        """One of the places on engine `i`: takes prompts until none is left."""
        while todo:
            place = todo.popleft()
            attempts[place] += 1
            try:
                answers[place] = await self._answer(i, rows[place], place)
            except EngineFailure as error:
                if attempts[place] == _ATTEMPTS:
                    raise RunError(f"evaluation: a prompt failed {_ATTEMPTS} times: {error}") from None
                todo.append(place)
                await self._repair(i, error)

    async def _answer(self, i: int, row: Row, place: int) -> Answer:
        config, samples = self._config, list[Sample]()
        most = min(config.generation.max_new_tokens, config.model.max_model_len - len(row.prompt_ids))
        asked = config.evaluation
        try:
            with self._wait(f"engine {i}"):
                samples = await self._fleet.engines[i].respond(
                    row.prompt_ids, most, row.images, asked.samples, asked.temperature, config.seed + place
                )
            self._check_versions(i, samples)
            with self._wait("the reward workers"):
                responses = [(sample.ids, sample.finish_reason == "stop") for sample in samples]
                rewards = await self._scorer.score(responses, row.answer, row.prompt, row.verifier)
        except DataError as error:
            return Answer(samples, None, str(error))
        return Answer(samples, rewards)

    def _check_versions(self, i: int, samples: Sequence[Sample]) -> None:
        wanted = self._snapshot.version if self._snapshot else 0
        found = {span.version for sample in samples for span in sample.versions}
        if found != {wanted}:
            # It was restarted under this request, or in between, and had not loaded the weights yet.
            raise EngineFailure(f"engine {i} answered with weights of version {sorted(found)}, not {wanted}")

    async def _repair(self, i: int, error: RunError) -> bool:
        """After a failure: restart the engine if it is of no more use and load the weights; True if that was done."""
        async with self._repairs[i]:
            if await self._usable(i):
                await asyncio.sleep(_RETRY_PAUSE_S)
                return False
            while True:
                if self._restarts_left == 0:
                    raise RunError(
                        f"evaluation: engine {i} failed, and no restart is left "
                        f"(generation.max_restarts: {self._config.generation.max_restarts}); see its log. Last: {error}"
                    ) from None
                self._restarts_left -= 1
                try:
                    with self._wait(f"the restart of engine {i}"):
                        await self._fleet.restart(i)
                        if self._snapshot is not None:
                            await self._fleet.engines[i].refresh(self._snapshot, "retract")
                    return True
                except RunError as again:  # it may die while it starts, too
                    error = again

    async def _usable(self, i: int) -> bool:
        """Alive, and the client has not given it up either (it does after a time-out or a half-done refresh)."""
        try:
            await self._fleet.engines[i].health()
        except EngineFailure:
            return False
        return self._fleet.alive(i)

    @contextmanager
    def _wait(self, whom: str) -> Iterator[None]:
        # Not in a `finally`: a wait that is cancelled stays in the count, for the deadline's message to read.
        self._waiting[whom] += 1
        try:
            yield
        except ForebayError:
            self._waiting[whom] -= 1
            raise
        self._waiting[whom] -= 1
