"""Notices an engine that has work and gives no sign of life.

Invariant: only silence of the whole engine counts; a request that waits while others make progress is no hang.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECOND_LOOK_S = 0.5
"""Silence may be our own: a busy event loop gets this long to read what has come."""


class Watchdog:
    """Calls `on_stall` once when, for `limit_s`, some call was under way, no refresh was, and no token came."""

    def __init__(self, limit_s: float, on_stall: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._last_sign = 0.0
        self._calls = self._halts = 0
        self._suspicious = False
        self._timer: asyncio.TimerHandle | None = None

    def sign(self) -> None:
        """The engine gave tokens."""
        self._last_sign = asyncio.get_running_loop().time()
        self._suspicious = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """The engine has work."""
        self._calls += 1
        if self._calls == 1:
            self.sign()
            self._look_in(self._limit_s)
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0 and self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def halt(self) -> Iterator[None]:
        """We asked the engine to pause; the refresh has a deadline of its own."""
        self._halts += 1
        try:
            yield
        finally:
            self._halts -= 1
            self.sign()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        if self._halts:
            self.sign()
        rest_s = self._last_sign + self._limit_s - asyncio.get_running_loop().time()
        if rest_s > 0:
            self._look_in(rest_s)
        elif self._suspicious:
            self._on_stall()
        else:
            self._suspicious = True
            self._look_in(min(SECOND_LOOK_S, self._limit_s))
