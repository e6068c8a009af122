"""The trainer's side of the conversation with the Control Unit (rank 0 only).

Invariants:
- The token travels in a header, never in a URL or a message.
- A lost connection is tried again until `patience_s` has passed since it was lost; a refusal is final at once.
- A repeated request is the same request: the Control Unit knows a step and a snapshot by its number.
"""

import contextlib
import json
import time
from typing import Any

import httpx
import msgpack

from forebay.control.types import Snapshot
from forebay.errors import DeadlineError, RunError

CONNECT_TIMEOUT_S = 5.0
LONGEST_BACKOFF_S = 0.5


class RunOver(Exception):
    """The Control Unit has answered 410; `str()` is its reason."""


class ControlClient:
    """Blocking. Methods raise `RunOver`, `RunError` (refused) or `DeadlineError` (silence)."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/msgpack"},
            timeout=httpx.Timeout(patience_s, connect=min(CONNECT_TIMEOUT_S, patience_s)),
            trust_env=False,
        )

    def next_batch(self, step: int, received: int | None = None) -> bytes | None:
        """The body of the batch of this step, or None: not yet, ask again. With `received` (groups of this step that
        are here already): a chunk, the groups that come next."""
        streaming = {} if received is None else {"streaming": True, "received": received}
        response = self._post("/v1/batches/next", {"step": step, **streaming})
        return None if response.status_code == 204 else response.content

    def report_step(
        self, step: int, *, train_wait_s: float, train_s: float, publish_s: float, metrics: dict[str, float]
    ) -> None:
        """Times in seconds."""
        times = {"train_wait_s": train_wait_s, "train_s": train_s, "publish_s": publish_s}
        self._post("/v1/steps", {"step": step, **times, "metrics": metrics})

    def report_snapshot(self, snapshot: Snapshot) -> None:
        self._post(
            "/v1/snapshots",
            {"version": snapshot.version, "path": snapshot.path, "manifest_sha256": snapshot.manifest_sha256},
        )

    def report_checkpoint(self, step: int) -> None:
        """Steps up to this one need never be trained again."""
        self._post("/v1/checkpoints", {"step": step})

    def _post(self, path: str, message: dict[str, Any]) -> httpx.Response:
        body = msgpack.packb(message)
        lost_at, pause = None, 0.0
        while True:
            trouble = ""
            try:
                response = self._http.post(path, content=body)
                if response.status_code < 500:
                    return _accepted(response, path)
                trouble = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                trouble = type(error).__name__
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            if now + pause - lost_at > self._patience_s:
                raise DeadlineError(
                    f"the Control Unit at {self._url} gave no answer to {path} for {self._patience_s:.0f} s ({trouble})"
                )
            time.sleep(pause)
            # The first repetition comes at once: an idle connection closed by the server is no trouble at all.
            pause = min(max(0.1, 2 * pause), LONGEST_BACKOFF_S)


def _accepted(response: httpx.Response, path: str) -> httpx.Response:
    if response.status_code in (200, 204):
        return response
    reason = ""
    with contextlib.suppress(ValueError, msgpack.UnpackException):
        packed = response.headers.get("content-type", "").startswith("application/msgpack")
        answer = msgpack.unpackb(response.content) if packed else json.loads(response.content)
        if isinstance(answer, dict):
            reason = str(answer.get("reason") or answer.get("detail") or "")
    if response.status_code == 410:
        raise RunOver(reason or "the run is over")
    raise RunError(f"the Control Unit refused {path}: HTTP {response.status_code}{f' ({reason})' if reason else ''}")
