"""The flow `pipeline`: five stages in turn, one summary at the end.

Invariants:
- A run that got a folder publishes a summary, however it ends: completed, failed or cancelled.
- The error that ended a run is the error that is raised, whatever happens while the failure is published.
- Nothing here starts a process or touches a token: the stages do, and end what they started in their own `finally`.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from prefect import flow

from flows.signals import orderly_termination
from forebay.config import RunConfig, load_profile
from forebay.errors import ForebayError, UserError
from forebay.run import RunContext
from forebay.storage import publish as storage
from forebay.storage.store import Store
from forebay.telemetry import report
from forebay.telemetry.summary import EndStatus, build_summary, error_line, failure_summary
from tasks.evaluate import evaluate
from tasks.predict_lengths import predict_lengths
from tasks.prepare_data import prepare_data
from tasks.publish import publish
from tasks.train import train

log = logging.getLogger("forebay.pipeline")
log.setLevel(logging.INFO)


@flow(name="pipeline")
def pipeline(
    profile: str = "profiles/quickstart_cpu.yaml",
    overrides: tuple[str, ...] = (),
    config: RunConfig | None = None,
) -> dict[str, Any]:
    """Train a model with reinforcement learning and publish it; returns the summary.

    Args:
        profile: YAML file with the settings of the run, relative to the repository.
        overrides: Changes to the profile, each `key.sub=value`.
        config: The whole settings, in place of profile and overrides.
    """
    if config is None:
        config = load_profile(profile, overrides)
    elif overrides:
        raise UserError("overrides change a profile; with config, change config itself")
    run = RunContext.create(config)
    log.info("run %s", run.run_id)
    started = time.monotonic()
    stages: dict[str, float] = {}
    try:
        Store(config.storage.uri, config.storage.endpoint_url).check()  # not after hours of training
        return _run_stages(run, stages, started)
    except BaseException as error:  # Prefect's TerminationSignal and Ctrl-C are no Exceptions
        _publish_failure(run, error, stages, time.monotonic() - started)
        raise


def _run_stages(run: RunContext, stages: dict[str, float], started: float) -> dict[str, Any]:
    with _stage("prepare_data", stages):
        prepare_data(run)
    with _stage("predict_lengths", stages):
        lengths, schedule = predict_lengths(run)
    with _stage("train", stages):
        trained = train(run)
    with _stage("evaluate", stages):
        evaluation = evaluate(run)
    summary = build_summary(
        run,
        stages=stages,
        wall_s=time.monotonic() - started,
        lengths=lengths,
        schedule=schedule,
        trained=trained,
        evaluation=evaluation,
    )
    with _stage("publish", stages):
        uri = publish(run, summary, evaluation)
    log.info("published at %s", uri)
    return summary


@contextlib.contextmanager
def _stage(name: str, stages: dict[str, float]) -> Iterator[None]:
    log.info("%s ...", name)
    started = time.monotonic()
    try:
        with orderly_termination():
            yield
    finally:
        stages[name] = time.monotonic() - started
    log.info("%s: %.1f s", name, stages[name])


def _publish_failure(run: RunContext, error: BaseException, stages: dict[str, float], wall_s: float) -> None:
    """Publish what is known of a run that ended early. The cause is worth more than this: trouble is only logged."""
    status: EndStatus = "failed" if isinstance(error, Exception) else "cancelled"
    summary = failure_summary(run, status=status, error=error, stages=stages, wall_s=wall_s)
    try:
        # The library, not the task: a cancelled Prefect run starts no further task.
        report.write_report(run, summary)
        log.info("%s; published at %s", status, storage.publish(run, summary))
    except (ForebayError, OSError) as trouble:
        log.error("the %s run could not be published: %s", status, error_line(run, trouble))
