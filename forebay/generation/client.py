"""The Control Unit's side of one Generation Unit: HTTP to a vLLM server.

Invariants:
- What comes back is complete and checked, or an exception: `EngineFailure` (the engine or the way to it),
  `RequestRefused` (this prompt, on any engine). Neither ever looks like a response.
- After a refresh that failed, either the old weights serve on, or this client refuses work until `reset`.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import httpx

from forebay.config import RunConfig
from forebay.control.types import EngineFailure, RefreshRecord, RequestRefused, Sample, Snapshot, VersionSpan

SEEDS_PER_REQUEST = 4096
"""vLLM gives child i of a request the seed + i; so far apart, two requests share no seed."""
KEEPALIVE_S = 2.0
"""Less than the 5 s after which the server closes idle connections."""
REFUSED = frozenset({400, 413, 422})
"""Statuses that are about the request itself."""
BACK_OUT_S = 10.0
"""For returning to the old weights after a refresh that failed."""
HEALTH_S = 5.0
REQUEST_FIELDS: Mapping[str, Any] = {"logprobs": 0, "detokenize": False}


class VllmEngine:
    """A `GenerationEngine`. One event loop's; `close` it."""

    def __init__(self, name: str, url: str, token: str, config: RunConfig) -> None:
        self.name = name
        self.url = url
        self._generation = config.generation
        self._broken: str | None = None
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(self._generation.request_timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )

    async def generate(self, prompt_ids: Sequence[int], n: int, seed: int) -> list[Sample]:
        """`n` samples at the run's temperature; the same seed and weights give the same samples."""
        sampling = {
            "n": n,
            "seed": seed * SEEDS_PER_REQUEST % 2**63,
            "temperature": self._generation.temperature,
            "max_tokens": self._generation.max_new_tokens,
        }
        return await self._sample(prompt_ids, sampling, n)

    async def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> Sample:
        """The most likely token at every step."""
        return (await self._sample(prompt_ids, {"n": 1, "temperature": 0.0, "max_tokens": max_tokens}, 1))[0]

    async def refresh(self, snapshot: Snapshot) -> RefreshRecord:
        """Stage and verify while decoding goes on, then freeze, swap, forget the KV cache and go on."""
        timeout_s = self._generation.refresh_timeout_s
        self._check_usable()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._refresh(snapshot)
        except TimeoutError:
            self._fail(f"the refresh to version {snapshot.version} was not done within {timeout_s:g} s")

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

    async def close(self) -> None:
        """Drop all connections; the server aborts what still runs for them. Later calls raise `EngineFailure`."""
        self._broken = "it was closed"
        await self._http.aclose()

    def reset(self) -> None:
        """The server was started afresh: trust it again."""
        self._broken = None

    async def _sample(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], n: int) -> list[Sample]:
        self._check_usable()
        body = {"token_ids": list(prompt_ids), "sampling_params": {**REQUEST_FIELDS, **sampling}}
        timeout_s = self._generation.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._call("POST", "/inference/v1/generate", body, again=True)
        except TimeoutError:
            self._fail(f"no answer to a request for {n} samples within {timeout_s:g} s")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != n:
            self._fail(f"{len(choices)} samples instead of {n}")
        return [self._read(choice) for choice in choices]

    def _read(self, choice: Mapping[str, Any]) -> Sample:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            self._fail(f"a sample ended with finish_reason {reason!r}")
        ids = tuple(choice["token_ids"])
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        spans = tuple(VersionSpan(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"])
        if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
            self._fail(f"{len(ids)} tokens with {len(logprobs)} log-probabilities, or some not finite")
        # Spans must tile [0, len(ids)).
        if [s.start for s in spans] + [len(ids)] != [0] + [s.end for s in spans]:
            self._fail(f"version spans {spans} do not cover {len(ids)} tokens")
        return Sample(ids, logprobs, spans, reason)

    async def _refresh(self, snapshot: Snapshot) -> RefreshRecord:
        await self._post("/start_weight_update")
        swapped = finished = paused = False
        try:
            await self._stage(snapshot)
            paused_at = time.monotonic()
            paused = True
            await self._post("/pause?mode=keep&clear_cache=true")
            swapped = True
            await self._post("/update_weights", {"update_info": {"action": "swap"}})
            await self._post("/finish_weight_update", {"weight_version": str(snapshot.version)})
            finished = True
        finally:
            if swapped and not finished:
                # New weights under an old name, or none at all: no token may come from here.
                self._broken = f"the swap to version {snapshot.version} did not complete; restart this engine"
            elif not finished:
                await self._back_out(paused)
        await self._post("/resume")
        return RefreshRecord(snapshot.version, time.monotonic() - paused_at)

    async def _back_out(self, paused: bool) -> None:
        """Close a refresh that has changed nothing: weights and version stay."""
        try:
            async with asyncio.timeout(BACK_OUT_S):
                await self._post("/finish_weight_update")
                if paused:
                    await self._post("/resume")
        except (EngineFailure, TimeoutError):
            self._broken = "it did not come back from a refresh that failed; restart this engine"
            raise

    async def _stage(self, snapshot: Snapshot) -> None:
        update = {
            "action": "stage",
            "path": snapshot.path,
            "version": snapshot.version,
            "manifest_sha256": snapshot.manifest_sha256,
        }
        await self._post("/update_weights", {"update_info": update})
        wait_s = 0.005
        while True:
            answer = await self._call("POST", "/collective_rpc", {"method": "forebay_staging_state"})
            states = {str(state) for state in answer["results"]}
            if states == {"staged"}:
                return
            if refusals := sorted(states - {"staged", "staging"}):
                self._fail(refusals[0])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.2)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, again: bool = False) -> Any:
        """The decoded answer, {} if empty. `again`: repeat once if the connection breaks before an answer."""
        try:
            response = await self._http.request(method, path, json=body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            # Most likely an idle connection that the server was closing at this moment.
            self._check_usable()
            if again:
                return await self._call(method, path, body)
            self._fail(f"{method} {path}: the connection broke ({error or type(error).__name__})")
        except httpx.TimeoutException:
            self._fail(f"{method} {path}: no answer in time")
        except httpx.TransportError as error:
            self._fail(f"{method} {path}: {error or type(error).__name__}")
        if response.status_code in REFUSED:
            raise RequestRefused(f"engine {self.name} refuses the request: {_message(response)}")
        if response.status_code != 200:
            self._fail(f"{method} {path}: status {response.status_code}: {_message(response)}")
        return response.json() if response.content else {}

    def _check_usable(self) -> None:
        if self._broken is not None:
            self._fail(self._broken)

    def _fail(self, what: str) -> NoReturn:
        raise EngineFailure(f"engine {self.name} at {self.url}: {what}")


def _message(response: httpx.Response) -> str:
    """vLLM's error message in one line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:500]
