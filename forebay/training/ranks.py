"""Start the ranks of one host and end them together. Standard library only: it starts in no time.

What `torchrun --standalone` does, without its rendezvous server, which listens on every interface and unpickles what
it is sent. Across hosts use torchrun; the worker takes either.

Invariants:
- The first rank that fails ends all; no rank outlives this process's normal exit or its SIGTERM.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

GRACE_S = 5.0
POLL_S = 0.05


def main() -> int:
    """Exit code of the first rank that failed, or 0."""
    parser = argparse.ArgumentParser(prog="forebay.training.ranks")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--job", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="forebay-ranks-") as folder:
        try:
            for rank in range(options.ranks):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(options.ranks),
                    "FOREBAY_RENDEZVOUS": f"{folder}/meet",
                }
                command = [sys.executable, "-m", "forebay.training.worker", "--job", str(options.job)]
                ranks.append(subprocess.Popen(command, env=environment))
            return _watch(ranks)
        finally:
            _end(ranks)


def _watch(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                if code < 0:
                    name = signal.Signals(-code).name
                    print(f"trainer: rank {rank} was ended by {name}", file=sys.stderr, flush=True)
                return code if code > 0 else 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
