"""Runs one command and sees to it that nothing of it is ever left behind. Standard library only; run as a script.

    guard.py CONTROL_FD PARENT_PID CORES -- COMMAND...      (CORES: "0,1", or "-" for all)

Invariants:
- The guard is a subreaper, so whatever the command starts, also in a new session, stays below it in the process tree.
- It ends the whole tree (SIGTERM, grace, SIGKILL) when its parent is gone in any way, when its parent asks by writing
  the grace in seconds to the control pipe, on SIGTERM or SIGINT, or when the command itself has ended.
- The command's temporary directory (TMPDIR, made by `spawn` for it alone) is removed with it.
- It exits with the command's exit code; 128 + N if signal N ended it, 127 if it could not be started.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_GRACE_S = 1.0
"""Grace when nobody waits for a tidy end: the parent has died, or the command has."""
SIGNAL_GRACE_S = 5.0
TRACKER_GRACE_S = 2.0
"""For Python's resource trackers, which remove the shared memory and semaphores of processes that were killed."""


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def start(command: list[str]) -> int:
    """Fork and execute the command; it dies with the guard even if the guard is killed. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"guard: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def descendants(root: int) -> list[int]:
    """Pids below `root` that are not zombies, from /proc."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X"):
                dead.add(int(name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if pid not in dead]


def is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


class Guard:
    """The loop around one command."""

    def __init__(self, control: int, parent: int, command: list[str]) -> None:
        self.control = control
        self.parent = parent
        self.exit_code: int | None = None
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.child = start(command)

    def reap(self) -> bool:
        """Collect what has died, remember the command's exit code; True if no child is left, dead or alive."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def wait(self, timeout_s: float) -> set[int]:
        """Sleep until a signal, a message or the timeout; returns the signals that came."""
        ready = select.select([self.wake, self.control], [], [], timeout_s)[0]
        return set(os.read(self.wake, 4096)) if self.wake in ready else set()

    def watch(self) -> float:
        """Until there is a reason to end the tree; returns the grace in seconds."""
        while True:
            signals = self.wait(1.0)
            self.reap()
            if self.exit_code is not None:
                return ORPHAN_GRACE_S
            if signals & {signal.SIGTERM, signal.SIGINT}:
                return SIGNAL_GRACE_S
            if select.select([self.control], [], [], 0)[0]:
                return self.grace_told(os.read(self.control, 4096))
            # A process that the parent forked may hold the pipe open after the parent's death.
            if os.getppid() != self.parent:
                return ORPHAN_GRACE_S

    def grace_told(self, message: bytes) -> float:
        """The last of the lines, if several callers said stop; an end of file says that the parent is gone."""
        try:
            return float(message.split()[-1])
        except (IndexError, ValueError):
            return ORPHAN_GRACE_S

    def end_tree(self, grace_s: float) -> None:
        """SIGTERM, wait, SIGKILL; resource trackers last, so that they can tidy up after the killed."""
        self.signal_and_wait(signal.SIGTERM, grace_s)
        while self.others():
            self.signal_and_wait(signal.SIGKILL, 0.5)
        deadline = time.monotonic() + TRACKER_GRACE_S
        while not self.reap():  # also the zombies: whoever adopts them may never collect them
            if time.monotonic() > deadline:
                for pid in descendants(os.getpid()):
                    kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def others(self) -> list[int]:
        """Living descendants but resource trackers, which ignore SIGTERM and end when nobody needs them any more."""
        self.reap()
        return [pid for pid in descendants(os.getpid()) if not is_tracker(pid)]

    def signal_and_wait(self, number: signal.Signals, wait_s: float) -> None:
        for pid in self.others():
            kill(pid, number)
        deadline = time.monotonic() + wait_s
        while self.others() and time.monotonic() < deadline:
            time.sleep(0.02)


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(arguments: list[str]) -> int:
    control, parent, cores = int(arguments[0]), int(arguments[1]), arguments[2]
    command = arguments[arguments.index("--") + 1 :]
    os.set_inheritable(control, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    guard = Guard(control, parent, command)
    grace_s = ORPHAN_GRACE_S
    try:
        grace_s = guard.watch()
    finally:
        guard.end_tree(grace_s)
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    return 1 if guard.exit_code is None else guard.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
