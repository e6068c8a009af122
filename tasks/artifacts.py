"""Prefect artifacts that cannot hurt a run.

Invariants:
- A slow, failing or absent Prefect server costs one warning and at most `DEADLINE_S`, never an exception.
- `TrainingProgress.report` touches no network: a thread of its own sends the newest values, one call each `interval_s`.
"""

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

DEADLINE_S = 15.0
"""An API call that takes longer (the client retries for over a minute in an outage) is left to itself."""

INTERVAL_S = 10.0
"""Each update is an event in the server's database: no more than one in so many seconds."""

log = logging.getLogger("forebay.artifacts")


def save_table(key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """A table artifact; `key` has lower-case letters, digits and dashes."""
    table = [dict(row) for row in rows]
    _within_deadline(lambda: create_table_artifact(table, key=key, description=description), key)


def save_markdown(key: str, text: str, description: str) -> None:
    """A Markdown artifact."""
    _within_deadline(lambda: create_markdown_artifact(text, key=key, description=description), key)


class TrainingProgress:
    """The progress artifact `training`: percent done, and the newest step's numbers as its description."""

    def __init__(self, steps: int, interval_s: float = INTERVAL_S) -> None:
        self._steps = steps
        self._interval_s = interval_s
        self._record: Mapping[str, Any] | None = None
        self._artifact: UUID | None = None
        self._ended = threading.Event()
        # The copied context carries the task run, which the artifact is linked to.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._send_all,), name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def report(self, record: Mapping[str, Any]) -> None:
        """Note a step's record; returns at once."""
        self._record = record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)

    def _send_all(self) -> None:
        sent: Mapping[str, Any] | None = None
        while True:
            ended = self._ended.wait(self._interval_s if sent is not None else min(1.0, self._interval_s))
            record = self._record
            if record is not None and record is not sent:
                sent = record
                _attempt(lambda record=record: self._send(record), "training")  # type: ignore[misc]
            if ended:
                return

    def _send(self, record: Mapping[str, Any]) -> None:
        percent = min(100.0, 100.0 * record["step"] / self._steps)
        text = describe_step(record, self._steps)
        if self._artifact is None:
            self._artifact = cast(UUID, create_progress_artifact(percent, key="training", description=text))
        else:
            update_progress_artifact(self._artifact, percent, description=text)


def describe_step(record: Mapping[str, Any], steps: int) -> str:
    """One line for people: step, reward, step time, wait, staleness."""
    parts = [f"step {record['step']}/{steps}"]
    for key, form in (
        ("reward_mean", "reward {:.3f}"),
        ("step_time_s", "step time {:.2f} s"),
        ("train_wait_s", "of it waiting {:.2f} s"),
        ("staleness_mean", "staleness {:.1f}"),
    ):
        if record.get(key) is not None:
            parts.append(form.format(record[key]))
    return ", ".join(parts)


def _within_deadline(call: Callable[[], object], key: str) -> None:
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_attempt, call, key), name=f"artifact-{key}", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        log.warning("artifact %s: no answer from the Prefect server in %.0f s; going on", key, DEADLINE_S)


def _attempt(call: Callable[[], object], key: str) -> None:
    try:
        call()
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError, ValueError) as error:
        log.warning("artifact %s not saved: %s: %s", key, type(error).__name__, " ".join(str(error).split())[:200])
