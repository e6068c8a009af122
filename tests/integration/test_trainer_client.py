"""The trainer's client against a server that misbehaves."""

import time
from typing import Any

import pytest

from forebay.control.types import Snapshot
from forebay.errors import DeadlineError, RunError
from forebay.training.client import ControlClient, RunOver
from tests.support.control_stub import ControlStub


class Failing(ControlStub):
    """Answers 503 the first `failures` times."""

    failures = 0

    def answer(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        if self.failures:
            self.failures -= 1
            return 503, None
        return super().answer(path, message)


def test_what_is_said_arrives_and_204_is_not_yet() -> None:
    with ControlStub("t", lambda step: None) as control:
        client = ControlClient(control.url, "t", 5)
        assert client.next_batch(1) is None
        client.report_step(1, train_wait_s=0.5, train_s=1.5, publish_s=0.25, metrics={"loss": 2.0})
        client.report_snapshot(Snapshot(1, "/x/v1", "ab"))
        client.report_checkpoint(1)
        client.next_batch(2, received=3)
    assert control.asked == [{"step": 1}, {"step": 2, "streaming": True, "received": 3}]
    assert control.checkpoints == [1]
    assert control.steps == [
        {"step": 1, "train_wait_s": 0.5, "train_s": 1.5, "publish_s": 0.25, "metrics": {"loss": 2.0}}
    ]
    assert control.snapshots == [{"version": 1, "path": "/x/v1", "manifest_sha256": "ab"}]


def test_a_short_outage_is_sat_out() -> None:
    with Failing("t", lambda step: {"step": step}) as control:
        control.failures = 3
        assert ControlClient(control.url, "t", 5).next_batch(1)
        assert control.failures == 0


def test_a_long_outage_has_a_deadline_that_names_the_control_unit() -> None:
    with Failing("t", lambda step: None) as control:
        control.failures = 10**6
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"Control Unit at {control.url} gave no answer .* 1 s \(HTTP 503\)"):
            ControlClient(control.url, "t", 1.0).next_batch(1)
        assert time.monotonic() - began < 3


def test_a_refusal_is_final() -> None:
    with ControlStub("t", lambda step: "all done") as control:
        with pytest.raises(RunError, match=r"refused /v1/batches/next: HTTP 401 \(no token\)"):
            ControlClient(control.url, "wrong", 60).next_batch(1)
        with pytest.raises(RunOver, match="all done"):
            ControlClient(control.url, "t", 60).next_batch(1)
