"""Nothing that is spawned is ever left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forebay.errors import UserError
from forebay.launch import ports, processes
from forebay.launch.processes import Process, spawn

# A tree with every way of escaping: a new session, a double fork, ignored SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"]
subprocess.Popen(sleeper, start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 300 & exit"]).wait()
print("ready", flush=True)
time.sleep(300)
"""
# Spawns the tree as Forebay would, says which processes there are, and waits to be killed.
OWNER = """
import sys, time
from pathlib import Path
from forebay.launch.processes import spawn
process = spawn("stubborn", [sys.executable, "-c", sys.argv[1]], env={}, log=Path(sys.argv[2]), cores=None)
while "ready" not in process.log_tail():
    time.sleep(0.02)
print(process.pid, *process.tree(), flush=True)
time.sleep(300)
"""


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stubborn(tmp_path: Path) -> Process:
    process = spawn("stubborn", [sys.executable, "-c", STUBBORN], env={}, log=tmp_path / "log", cores=None)
    wait_until(lambda: "ready" in process.log_tail())
    assert len(process.tree()) == 3
    return process


def test_stop_ends_the_whole_tree_and_can_be_repeated(tmp_path: Path) -> None:
    process = stubborn(tmp_path)
    pids = [process.pid, *process.tree()]
    started = time.monotonic()
    process.stop(0.3)
    assert time.monotonic() - started < 12  # a moment, but for a busy machine; its time to end them is over at 15 s
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # not even as zombies
    process.stop(0.3)
    assert process.describe_exit() == "was ended by SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_death_of_the_owner_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, STUBBORN, str(tmp_path / "log")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(running, pids))
    owner.send_signal(number)
    owner.wait(10)
    wait_until(lambda: not any(map(running, pids)))
    owner.stdout.close()


def test_killing_the_guard_leaves_nothing(tmp_path: Path) -> None:
    process = stubborn(tmp_path)
    pids = process.tree()
    folder = Path(process._temporary)
    assert folder.exists()
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process.poll() is not None)
    assert not folder.exists()
    assert not any(map(running, pids))


def test_killing_the_guard_leaves_no_process_with_a_title_of_its_own(tmp_path: Path) -> None:
    """Such as vLLM's EngineCore, which outlives its parent."""
    child = (
        "import os, setproctitle, time; setproctitle.setproctitle('T'); print(os.getpid(), flush=True); time.sleep(300)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = spawn("titled", [sys.executable, "-c", parent], env={}, log=tmp_path / "log")
    wait_until(lambda: process.log_tail() != "")
    pid = int(process.log_tail())
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process.poll() is not None)
    assert not running(pid)


def test_a_guard_that_is_stopped_does_not_keep_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GUARD_S", 0.3)
    process = stubborn(tmp_path)
    pids = process.tree()
    os.killpg(process.pid, signal.SIGSTOP)  # the guard and the command
    monkeypatch.setattr(process, "wait", lambda _, wait=process.wait: wait(10.0))  # for the kill, on a busy machine
    process.stop(0.0)
    assert not any(map(running, pids))
    assert not Path(process._temporary).exists()


def test_end_of_the_command_ends_what_it_started(tmp_path: Path) -> None:
    script = f"setsid {sys.executable} -S -c 'import time; time.sleep(300)' & echo $!; sleep 0.2; exit 7"
    process = spawn("short", ["sh", "-c", script], env={}, log=tmp_path / "log", cores=None)
    assert process.wait(10) == 7
    assert process.describe_exit() == "ended with exit code 7"
    assert not running(int(process.log_tail()))


def test_two_stops_at_once_leave_nothing(tmp_path: Path) -> None:
    program = (
        "import subprocess, time; print(subprocess.Popen(['setsid', 'sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    process = spawn("twice", [sys.executable, "-c", program], env={}, log=tmp_path / "log")
    deadline = time.monotonic() + 10
    while not process.log_tail(1).strip() and time.monotonic() < deadline:
        time.sleep(0.02)
    grandchild = int(process.log_tail(1))
    os.kill(process.pid, signal.SIGSTOP)  # as on a busy machine: both messages wait when the guard runs again
    stops = [threading.Thread(target=process.stop, args=(grace,)) for grace in (0.0, 3.0)]
    for stop in stops:
        stop.start()
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGCONT)
    for stop in stops:
        stop.join(20)
    assert process.poll() is not None
    assert not Path(f"/proc/{grandchild}").exists()


def test_a_signal_shows_in_the_exit_code(tmp_path: Path) -> None:
    process = spawn("victim", ["sh", "-c", "kill -9 $$"], env={}, log=tmp_path / "log", cores=None)
    assert process.wait(10) == 137
    assert process.describe_exit() == "was ended by SIGKILL"


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    process = spawn("nothing", ["no-such-command"], env={}, log=tmp_path / "log", cores=None)
    assert process.wait(10) == 127
    assert "cannot start no-such-command: No such file or directory" in process.log_tail()


def test_environment_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN_AWAY", "1")
    core = max(os.sched_getaffinity(0))
    script = "import os; print(os.environ.get('ADDED'), os.environ.get('TAKEN_AWAY'), os.sched_getaffinity(0))"
    environment = {"ADDED": "yes", "TAKEN_AWAY": None}
    process = spawn("env", [sys.executable, "-c", script], env=environment, log=tmp_path / "log", cores=[core])
    assert process.wait(20) == 0
    assert process.log_tail() == f"yes None {{{core}}}"


def test_shared_memory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    script = (
        "import time; from multiprocessing import shared_memory as m; "
        "s = m.SharedMemory(create=True, size=4096); print(s.name, flush=True); time.sleep(300)"
    )
    process = spawn("memory", [sys.executable, "-c", script], env={}, log=tmp_path / "log", cores=None)
    wait_until(lambda: process.log_tail() != "")
    name = Path("/dev/shm") / process.log_tail()
    assert name.exists()
    process.stop(0.0)
    assert not name.exists()


def test_temporary_files_go_with_the_process(tmp_path: Path) -> None:
    process = spawn(
        "files", ["sh", "-c", "echo x > $TMPDIR/left; echo $TMPDIR; sleep 300"], env={}, log=tmp_path / "log"
    )
    wait_until(lambda: process.log_tail() != "")
    folder = Path(process.log_tail())
    assert (folder / "left").exists()
    process.stop(0.0)
    assert not folder.exists()


def test_log_tail_keeps_the_last_lines(tmp_path: Path) -> None:
    process = spawn("lines", ["seq", "100000"], env={}, log=tmp_path / "log", cores=None)
    assert process.wait(10) == 0
    assert process.log_tail(2) == "99999\n100000"


def test_port_in_use_names_the_process_and_the_way_out() -> None:
    with ports.hold_port("127.0.0.1", 0) as server:
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(UserError) as error:
            ports.require_free("127.0.0.1", port, "generation.base_port")
    assert f"port {port} on 127.0.0.1" in str(error.value)
    assert f"pid {os.getpid()}" in str(error.value)
    assert "generation.base_port" in str(error.value)
    ports.require_free("127.0.0.1", port, "generation.base_port")


def test_a_held_port_can_be_served_but_is_never_given_away() -> None:
    with ports.hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        for _ in range(2):  # a restart as well
            with ports.hold_port("127.0.0.1", port) as server:
                server.listen()
        assert port not in {ports.free_port("127.0.0.1") for _ in range(200)}
