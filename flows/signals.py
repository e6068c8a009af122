"""SIGTERM during a stage: the stage ends in order, then Prefect hears of it.

Invariants:
- Inside the context SIGTERM is as Ctrl-C: `asyncio.run` cancels its main task, plain code gets KeyboardInterrupt.
- When the context ends, whoever handled SIGTERM before gets it, once; it is never lost.
"""

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Prefect's handler raises an exception in whatever code happens to run. In an event loop that may be a request
    handler or a background task, whose frameworks catch everything: the signal would be swallowed and the run killed
    at the end of Prefect's grace period.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    before_term = signal.signal(signal.SIGTERM, interrupt)
    before_int = signal.getsignal(signal.SIGINT)
    if before_int is signal.SIG_IGN:  # inherited by workers that a script has started with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before_int)
        signal.signal(signal.SIGTERM, before_term)
        if terminated:
            signal.raise_signal(signal.SIGTERM)
