"""`run_pipeline`: the flow on this machine, as `forebay run` starts it.

Invariants:
- Prefect is imported only after its environment is set; whatever the user has set in it wins.
- Without a configured Prefect server one is started for the run, on loopback, with a secret, and ended with it.
- The terminal shows the run's own lines; Prefect's go to its server.
"""

import base64
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from forebay.config import RunConfig
from forebay.errors import DeadlineError, RunError, UserError
from forebay.launch.main_script import require_guard

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "forebay",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""Environment of a run in a terminal."""

# What only deployments, schedules, workers and automations need; a run's history (events, task runs) is kept.
UNUSED_SERVICES = (
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "DB_VACUUM",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)

STARTUP_TIMEOUT_S = 120.0
"""The first start makes the database: 8 s on two idle cores, several times that on busy ones."""

DRAIN_TIMEOUT_S = 5.0


def run_pipeline(config: RunConfig, console: Console | None = None) -> dict[str, Any]:
    """Run the flow `pipeline` and return its summary.

    Raises what the stages raise (`ForebayError`), `KeyboardInterrupt` for Ctrl-C and SIGTERM; either way the failure
    is published and no process is left.
    """
    require_guard()
    home = Path(os.environ.get("PREFECT_HOME") or Path(config.storage.scratch).resolve() / "prefect")
    with _environment(home), _lines_on(console or Console()), _sigterm_interrupts(), _prefect_api(home):
        from flows.pipeline import pipeline

        return pipeline(config=config)


@contextlib.contextmanager
def _environment(home: Path) -> Iterator[None]:
    """`QUIET` and a home for Prefect: neither what the user has set, nor a home if they have Prefect profiles."""
    wanted = dict(QUIET)
    if not Path("~/.prefect/profiles.toml").expanduser().exists():
        wanted["PREFECT_HOME"] = str(home)
        _make(home)  # Prefect makes no parents, and says so
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _make(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{home} cannot be made ({error.strerror}): choose another storage.scratch") from None


@contextlib.contextmanager
def _prefect_api(home: Path) -> Iterator[None]:
    """The server the user has configured (environment, profile or prefect.toml), else a temporary one."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        yield
        return
    with (
        temporary_server(home) as (url, auth),
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth}),
        _drained(),
    ):
        yield


@contextlib.contextmanager
def _drained() -> Iterator[None]:
    """At the end send what Prefect still has in its queues: its own way, at exit, would find the server gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    try:
        yield
    finally:
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=DRAIN_TIMEOUT_S)


@contextlib.contextmanager
def temporary_server(home: Path) -> Iterator[tuple[str, str]]:
    """A Prefect API server on loopback for as long as the context lasts: (API URL, `user:password`).

    Its database stays in `home`, so that the next start is quick and the history can be looked at.
    Prefect's own temporary server would die of the terminal's Ctrl-C before the run could report its end to it, and
    outlive a killed run; this one is a guarded process in a session of its own.
    """
    from forebay.launch.ports import free_port
    from forebay.launch.processes import spawn

    _make(home)
    port = free_port("127.0.0.1")
    auth = f"forebay:{secrets.token_urlsafe(24)}"
    process = spawn(
        "prefect-server",
        _server_command(port),
        env=_server_environment(home, auth),
        log=home / "server.log",
        cores=None,
    )
    try:
        # Importing the flow takes seconds too: side by side with the server's start.
        import flows.pipeline  # noqa: F401

        _wait_until_ready(process, port, auth)
        yield f"http://127.0.0.1:{port}/api", auth
    finally:
        process.stop(grace_s=5.0)


def _server_command(port: int) -> list[str]:
    app = "prefect.server.api.server:create_app"
    options = {"--host": "127.0.0.1", "--port": str(port), "--log-level": "error", "--lifespan": "on"}
    return [sys.executable, "-m", "uvicorn", "--factory", app, *(word for option in options.items() for word in option)]


def _server_environment(home: Path, auth: str) -> dict[str, str]:
    unused = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in UNUSED_SERVICES}
    return {
        **unused,
        "PREFECT_HOME": str(home),
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_UI_ENABLED": "false",
    }


def _wait_until_ready(process: Any, port: int, auth: str) -> None:
    import httpx

    header = {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()}
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    with httpx.Client(headers=header, trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RunError(f"the temporary Prefect server ended at once; its last words: {process.log_tail(5)!r}")
            with contextlib.suppress(httpx.HTTPError):
                # Not /health: that one asks for no password, so that any other server on the port would pass.
                if client.get(f"http://127.0.0.1:{port}/api/admin/version").status_code == 200:
                    return
            time.sleep(0.1)
    raise DeadlineError(
        f"the temporary Prefect server was not ready after {STARTUP_TIMEOUT_S:.0f} s; its last words: "
        f"{process.log_tail(5)!r}"
    )


class _Lines(logging.Handler):
    """Log records as plain lines on a rich console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        self._console.print(record.getMessage(), style=style, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _lines_on(console: Console) -> Iterator[None]:
    logger = logging.getLogger("forebay")
    handler = _Lines(console)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does.

    Prefect raises its own exception inside the flow and then hands SIGTERM to the handler that was there before, by
    default the end of the process: before the server is stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
