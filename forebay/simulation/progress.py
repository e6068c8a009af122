"""What a simulation does, said on stderr while it lasts: on a terminal one line that changes and is gone at the end,
elsewhere a line every `PERIOD_S` seconds. What takes less says nothing there. Stdout is for results.

Invariant: who works sets numbers and nothing else; a thread of its own reads and says them.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PERIOD_S, REDRAWN_S = 10.0, 0.25


@dataclass(slots=True)
class Progress:
    """Set by whoever works."""

    doing: str
    steps: int = 0
    """Of these, 0 if no steps are simulated now."""
    done: int = 0
    groups: int = 0
    """Generated so far in this simulation."""

    def begin(self, doing: str, steps: int = 0) -> None:
        """Something else is being done now."""
        self.steps = self.done = self.groups = 0
        self.doing, self.steps = doing, steps

    def __str__(self) -> str:
        part = f": step {min(self.done + 1, self.steps)} of {self.steps}, {self.groups:,} groups generated"
        return self.doing + (part if self.steps else "")


@contextmanager
def shown(doing: str) -> Iterator[Progress]:
    """To be told what is done; says it for as long as this is entered."""
    from rich.console import Console

    progress, over, begun = Progress(doing), threading.Event(), time.monotonic()
    console = Console(stderr=True)

    def line() -> str:
        return f"{progress} ({time.monotonic() - begun:.0f} s)"

    def redraw() -> None:
        with console.status(line()) as status:
            while not over.wait(REDRAWN_S):
                status.update(line())

    def tell() -> None:
        while not over.wait(PERIOD_S):
            print(f"forebay: {line()}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=redraw if console.is_terminal else tell, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join()
