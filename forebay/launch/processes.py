"""Child processes that cannot be left behind.

Invariants:
- Every child runs under `forebay.launch.guard`: if this process dies in any way, the child and all it started end.
- `stop` returns only when nothing of the child is left; it may be called any number of times.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.errors import RunError
from forebay.launch import guard

GUARD_S = 15.0
"""Longest that a guard takes to end its tree, beyond the grace."""
MARK = "FOREBAY_PROCESS"
"""Environment variable with a random value for each child: finds what is left if the guard itself is killed."""


class Process:
    """A running child. Made by `spawn`."""

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], control: int, log: Path, mark: str, temporary: str
    ) -> None:
        self.name = name
        self.log = log
        self._popen = popen
        self._control: int | None = control
        self._mark = mark
        self._started = time.monotonic()
        self._lock = threading.RLock()  # stop may be called from several threads at the same time
        self._temporary = temporary

    @property
    def pid(self) -> int:
        """Of the guard; the command and all it started are below it (`tree`)."""
        return self._popen.pid

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def tree(self) -> list[int]:
        """Pids of the command and of all it started, the command first."""
        return guard.descendants(self.pid)

    def poll(self) -> int | None:
        """None while it runs, else its exit code (128 + N if signal N ended it)."""
        code = self._popen.poll()
        if code is not None:
            self._clear()
            return 128 - code if code < 0 else code
        return None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self.poll()

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM to all of it, SIGKILL after `grace_s` seconds; returns when it is gone. `RunError` if it stays."""
        with self._lock:
            if self._popen.poll() is None and self._control is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._control, f"{grace_s}\n".encode())
        if self._popen.poll() is None:
            # The guard kills for as long as anything lives; only a process stuck in the kernel outlasts this.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s + GUARD_S)
        stuck = self._popen.poll() is None
        if stuck:
            self._popen.kill()  # a guard that is stopped, perhaps; `poll` ends what it leaves
        if self.wait(GUARD_S) is None or (stuck and _marked(self._mark)):
            raise RunError(f"{self.name} (pid {self.pid}) does not end, not even by SIGKILL; look at it with ps")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def describe_exit(self) -> str:
        """For messages: "ended with exit code 3", "was ended by SIGKILL", "runs"."""
        code = self.poll()
        if code is None:
            return "runs"
        if code > 128 and code - 128 in set(signal.Signals):
            return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"

    def _clear(self) -> None:
        """Once, after the guard has ended: close the pipe and end what a killed guard has left."""
        with self._lock:
            if self._control is None:
                return
            os.close(self._control)
            self._control = None
        deadline = time.monotonic() + 5
        while (left := _marked(self._mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self._temporary, ignore_errors=True)


def spawn(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None],
    log: Path,
    cores: Sequence[int] | None = None,
) -> Process:
    """Start `argv` with its output appended to `log`, pinned to `cores`.

    `env` is laid over this process's environment; None takes a variable away. A command that cannot be started shows
    as exit code 127 with the reason in the log.
    """
    mark = secrets.token_hex(8)
    # vLLM and torch leave sockets and rendezvous files there when they are killed. A short path: sockets need it.
    temporary = tempfile.mkdtemp(prefix="forebay-")
    # A process that gives itself a title with setproctitle, as EngineCore does, would wipe out the mark otherwise.
    merged = {**os.environ, **env, MARK: mark, "TMPDIR": temporary, "SPT_NOENV": "1"}
    environment = {key: value for key, value in merged.items() if value is not None}
    reader, writer = os.pipe()
    # -I -S: no site-packages, no user settings; the guard is up in about 20 ms.
    prefix = [sys.executable, "-I", "-S", guard.__file__, str(reader), str(os.getpid())]
    pinned = ",".join(str(core) for core in cores) if cores else "-"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*prefix, pinned, "--", *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[reader],
                start_new_session=True,
            )
    except OSError as error:
        os.close(writer)
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"{name} cannot be started: {error}") from error
    finally:
        os.close(reader)
    return Process(name, popen, writer, log, mark, temporary)


def _marked(mark: str) -> list[int]:
    """Living processes whose environment carries this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found
