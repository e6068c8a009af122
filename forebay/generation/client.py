"""The Control Unit's side of one Generation Unit: HTTP to a vLLM server.

Invariants:
- What comes back is complete and checked, or an exception: `EngineFailure` (the engine or the way to it),
  `RequestRefused` (this prompt, on any engine). Neither ever looks like a response.
- An `EngineFailure` of `generate` carries what is certain of each response, to be continued elsewhere.
- After a refresh that failed, either the old weights serve on, or this client refuses work until `reset`.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import httpx

from forebay.config import RunConfig
from forebay.control.types import (
    NOTHING,
    EngineFailure,
    EngineLoad,
    GenerationAborted,
    OnFinished,
    RefreshMode,
    RefreshRecord,
    RequestRefused,
    Sample,
    Snapshot,
)
from forebay.generation import engine_core
from forebay.generation.bodies import SEEDS_PER_REQUEST, body_of, seed_of_continuation
from forebay.generation.images import Encoder
from forebay.generation.responses import BadChunk, Response, error_message, error_text
from forebay.generation.watchdog import Watchdog

KEEPALIVE_S = 2.0
"""Less than the 5 s after which the server closes idle connections."""
REFUSED = frozenset({400, 413, 422})
"""Statuses that are about the request itself."""
BACK_OUT_S = 10.0
"""For returning to the old weights after a refresh that failed."""
HEALTH_S = 5.0
HEALTH_EVERY_S = 1.0
"""How often an engine that takes new weights is asked whether it lives."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.005, 0.2
"""Between two questions whether a snapshot is ready."""
SOONER = 0.9
"""Share of what the last one took before the first question: what took longer by chance gets shorter again."""
_BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
_Request = tuple[Mapping[str, Any], Sequence[Response]]
"""The body, and the responses that its choices are."""


class VllmEngine:
    """A `GenerationEngine`. One event loop's; `close` it."""

    def __init__(self, name: str, url: str, token: str, config: RunConfig, encoder: Encoder | None = None) -> None:
        """`encoder`: of a model that reads images."""
        self.name = name
        self.url = url
        self._generation = config.generation
        self._encoder = encoder
        self._broken: str | None = None
        self._calls: set[asyncio.Timeout] = set()
        self._running: set[Response] = set()
        self._kept_caches: set[int] = set()
        self._tokens = self._prompts = 0
        self._staging_s = SHORTEST_WAIT_S
        self._watchdog = Watchdog(config.generation.stall_timeout_s, self._stalled)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(self._generation.request_timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        prefixes: Sequence[Sample],
        seed: int,
        on_finished: OnFinished | None = None,
        images: Sequence[str] = (),
    ) -> list[Sample]:
        """A `GenerationEngine`'s; the same seed, prefixes and weights give the same samples."""
        budget = self._generation.max_new_tokens
        responses = [Response(prefix, budget, len(prompt_ids), on_finished) for prefix in prefixes]
        base, features = seed * SEEDS_PER_REQUEST, self._features(prompt_ids, images)
        if all(not prefix.ids for prefix in prefixes):
            requests = [self._request(prompt_ids, features, budget, base, responses)]
        else:
            requests = [
                self._request(
                    [*prompt_ids, *response.prefix.ids],
                    features,
                    budget - len(response.prefix.ids),
                    seed_of_continuation(base + place, len(response.prefix.ids)),
                    [response],
                )
                for place, response in enumerate(responses)
                if not response.finished
            ]
        await self._sample(requests, responses)
        return [response.sample() for response in responses]

    async def greedy(self, prompt_ids: Sequence[int], max_tokens: int, images: Sequence[str] = ()) -> Sample:
        """The most likely token at every step."""
        (sample,) = await self.respond(prompt_ids, max_tokens, images, count=1, temperature=0.0, seed=0)
        return sample

    async def respond(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        images: Sequence[str],
        count: int,
        temperature: float,
        seed: int,
    ) -> list[Sample]:
        """`count` responses from the first token on."""
        responses = [Response(NOTHING, max_tokens, len(prompt_ids)) for _ in range(count)]
        sampling = {"n": count, "temperature": temperature, "max_tokens": max_tokens}
        if temperature:
            sampling["seed"] = seed * SEEDS_PER_REQUEST % 2**63
        body = body_of(prompt_ids, self._features(prompt_ids, images), sampling)
        await self._sample([(body, responses)], responses)
        return [response.sample() for response in responses]

    async def refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        """Stage and verify while decoding goes on, then swap as `mode` says within one call to the engine.

        `pause_s` is the engine's own measurement. With `drain` the limit is that of a request besides.
        """
        timeout_s = self._generation.refresh_timeout_s
        if mode == "drain":
            timeout_s += self._generation.request_timeout_s
        self._check_usable()
        try:
            async with asyncio.timeout(timeout_s) as timer:
                dying = asyncio.create_task(self._notice_death(timer))
                try:
                    return await self._refresh(snapshot, mode)
                finally:
                    dying.cancel()
        except TimeoutError:
            if dying.done() and not dying.cancelled():
                raise EngineFailure(f"{dying.result()}, while it took version {snapshot.version}") from None
            self._fail(f"the refresh to version {snapshot.version} was not done within {timeout_s:g} s")

    async def _notice_death(self, timer: asyncio.Timeout) -> str:
        """End a refresh that a dead engine will not finish: its server answers without it, but knows; or does not
        answer at all. Returns why."""
        limit_s = self._generation.stall_timeout_s
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                async with asyncio.timeout(limit_s):
                    await self._call("GET", "/health")
                continue
            except EngineFailure as failure:
                why = str(failure)
            except TimeoutError:
                why = f"engine {self.name} at {self.url}: GET /health: no answer within {limit_s:g} s"
            with suppress(RuntimeError):  # its time is over anyway
                timer.reschedule(0)
            return why

    async def health(self) -> None:
        """Raises `EngineFailure` unless the server and its engine process answer."""
        self._check_usable()
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._call("GET", "/health")
        except TimeoutError:
            self._fail(f"GET /health: no answer within {HEALTH_S:g} s")

    async def set_version(self, version: int) -> None:
        """Name the weights that serve now."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    def load(self) -> EngineLoad:
        """A `GenerationEngine`'s."""
        active = [response for response in self._running if not response.finished]
        return EngineLoad(len(active), sum(r.prompt_tokens + len(r) for r in active), self._tokens, self._prompts)

    async def close(self) -> None:
        """Drop all connections; the server aborts what still runs for them. Later calls raise `EngineFailure`."""
        self._broken = "it was closed"
        self._end_calls()
        await self._http.aclose()

    def reset(self) -> None:
        """The server was started afresh: trust it again."""
        self._broken = None
        self._kept_caches.clear()
        self._staging_s = SHORTEST_WAIT_S

    def _features(self, prompt_ids: Sequence[int], images: Sequence[str]) -> Mapping[str, Any]:
        """What the body has beyond a text prompt's."""
        if not images:
            return {}
        if self._encoder is None:
            raise RequestRefused(f"engine {self.name} serves a model that reads no images")
        return {"features": self._encoder.features(prompt_ids, images)}

    def _request(
        self,
        token_ids: Sequence[int],
        features: Mapping[str, Any],
        max_tokens: int,
        seed: int,
        responses: Sequence[Response],
    ) -> _Request:
        sampling = {
            "n": len(responses),
            "seed": seed % 2**63,
            "temperature": self._generation.temperature,
            "max_tokens": max_tokens,
        }
        return body_of(token_ids, features, sampling), responses

    async def _sample(self, requests: Sequence[_Request], responses: Sequence[Response]) -> None:
        """Do all requests at the same time; raises as `generate` does."""
        self._check_usable()
        timeout_s = self._generation.request_timeout_s
        timer = asyncio.timeout(timeout_s)
        self._running.update(responses)
        self._prompts += sum(len(body["token_ids"]) for body, _ in requests)
        self._calls.add(timer)
        try:
            async with timer:
                with self._watchdog.call():
                    await _all(self._stream(body, part) for body, part in requests)
        except TimeoutError:
            why = self._broken or f"no answer to a request for {len(responses)} samples within {timeout_s:g} s"
            self._fail(why, responses)
        except EngineFailure as error:
            raise EngineFailure(str(error), [response.sample() for response in responses]) from None
        finally:
            self._calls.discard(timer)
            self._running.difference_update(responses)
        if any(response.aborted and not response.dismissed for response in responses):
            self._fail("it ended responses that nobody has told it to end: it is being shut down", responses)
        if any(response.aborted for response in responses):
            raise GenerationAborted([response.sample() for response in responses])
        if unfinished := sum(not response.finished for response in responses):
            self._fail(f"{unfinished} of {len(responses)} samples never ended", responses)

    async def _stream(self, body: Mapping[str, Any], responses: Sequence[Response], again: bool = True) -> None:
        """Fill `responses` from one request. `again`: repeat once if the connection breaks before an answer."""
        path, answered = "/inference/v1/generate", False
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                answered = True
                if answer.status_code != 200:
                    await answer.aread()
                    self._check_status("POST", path, answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        self._watchdog.sign()
                        self._take(json.loads(line[6:]), responses)
        except httpx.HTTPError as error:
            self._check_usable()
            if again and not answered and isinstance(error, _BROKEN):
                # Most likely an idle connection that the server was closing at this moment.
                return await self._stream(body, responses, again=False)
            self._fail(f"POST {path}: the connection broke ({error or type(error).__name__})")

    def _take(self, chunk: Mapping[str, Any], responses: Sequence[Response]) -> None:
        if "error" in chunk:
            # Once a stream has begun, the status is 200 whatever happens.
            if isinstance(chunk["error"], dict) and chunk["error"].get("code") in REFUSED:
                raise RequestRefused(f"engine {self.name} refuses the request: {error_text(chunk)}")
            self._fail(f"it gave up a request: {error_text(chunk)}")
        try:
            for choice in chunk["choices"]:
                self._tokens += responses[choice["index"]].add(choice, self._kept_caches)
        except (BadChunk, KeyError, IndexError, TypeError) as error:
            self._fail(str(error) if isinstance(error, BadChunk) else f"an unreadable answer: {error!r}")

    def _stalled(self) -> None:
        limit_s = self._generation.stall_timeout_s
        self._broken = f"it has work and gave no token for {limit_s:g} s (generation.stall_timeout_s): it hangs"
        self._end_calls()

    def _end_calls(self) -> None:
        """All calls under way fail now, for the reason in `_broken`."""
        for timer in self._calls:
            with suppress(RuntimeError):  # it ends just now anyway
                timer.reschedule(0)

    async def _refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        await self._begin(snapshot)
        swapping = done = False
        try:
            await self._staged()
            swapping = True
            record = await self._swap(snapshot, mode)
            done = True
        finally:
            if swapping and not done:
                # New weights under an old name, or none at all: no token may come from here.
                self._broken = f"the swap to version {snapshot.version} did not complete; restart this engine"
            elif not done:
                await self._back_out()
        return record

    async def _begin(self, snapshot: Snapshot) -> None:
        update = {"path": snapshot.path, "version": snapshot.version, "manifest_sha256": snapshot.manifest_sha256}
        await self._call("POST", "/collective_rpc", {"method": "forebay_stage", "kwargs": {"update": update}})

    async def _staged(self) -> None:
        """Until the snapshot is ready. Asks first when the last one was: every question costs the engine time."""
        begin = time.monotonic()
        for wait_s in itertools.chain([self._staging_s], _longer_and_longer()):
            await asyncio.sleep(wait_s)
            answer = await self._call("POST", "/collective_rpc", {"method": "forebay_staging_state"})
            states = {str(state) for state in answer["results"]}
            if states == {"staged"}:
                break
            if refusals := sorted(states - {"staged", "staging"}):
                self._fail(refusals[0])
        self._staging_s = min(SOONER * (time.monotonic() - begin), LONGEST_WAIT_S)

    async def _swap(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        # Before the swap: its first tokens may be here before its answer is.
        (self._kept_caches.add if mode == "in_place" else self._kept_caches.discard)(snapshot.version)
        discarded = sum(len(r.prefix.ids) for r in self._running if not r.finished) if mode == "abort" else 0
        for response in self._running if mode == "abort" else ():
            response.dismissed = True
        call = {"method": engine_core.REFRESH, "kwargs": {"mode": mode, "version": str(snapshot.version)}}
        with self._watchdog.halt():
            answer = await self._call("POST", "/collective_rpc", call)
        (record,) = answer["results"]
        return RefreshRecord(
            snapshot.version, record["pause_s"], record["tokens_recomputed"], record["tokens_discarded"] + discarded
        )

    async def _back_out(self) -> None:
        """Close a refresh that has changed nothing: weights and version stay."""
        try:
            async with asyncio.timeout(BACK_OUT_S):
                await self._post("/finish_weight_update")
        except (EngineFailure, TimeoutError):
            self._broken = "it did not come back from a refresh that failed; restart this engine"
            raise

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded answer, {} if empty."""
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TimeoutException:
            self._fail(f"{method} {path}: no answer in time")
        except _BROKEN as error:
            self._check_usable()
            self._fail(f"{method} {path}: the connection broke ({error or type(error).__name__})")
        except httpx.TransportError as error:
            self._fail(f"{method} {path}: {error or type(error).__name__}")
        self._check_status(method, path, response)
        return response.json() if response.content else {}

    def _check_status(self, method: str, path: str, response: httpx.Response) -> None:
        if response.status_code in REFUSED:
            raise RequestRefused(f"engine {self.name} refuses the request: {error_message(response)}")
        if response.status_code != 200:
            self._fail(f"{method} {path}: status {response.status_code}: {error_message(response)}")

    def _check_usable(self) -> None:
        if self._broken is not None:
            self._fail(self._broken)

    def _fail(self, what: str, responses: Sequence[Response] = ()) -> NoReturn:
        raise EngineFailure(f"engine {self.name} at {self.url}: {what}", [r.sample() for r in responses])


def _longer_and_longer() -> Iterator[float]:
    """Seconds between two questions, without end."""
    wait_s = SHORTEST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def _all(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at the same time; the first exception ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
