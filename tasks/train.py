"""The task `train`: asynchronous training, watched through a progress artifact."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from forebay import train as stage
from forebay.run import RunContext
from tasks.artifacts import TrainingProgress, describe_step

if TYPE_CHECKING:
    from forebay.train import TrainResult

LOG_EVERY_S = 5.0

log = logging.getLogger("forebay.pipeline")


# Called directly, never submitted: in a worker thread Prefect's cancellation would not reach the stage's `finally`.
@task(name="train", cache_policy=NO_CACHE)
def train(run: RunContext) -> "TrainResult":
    """See `forebay.train.train`; saves the artifact `training` and logs a step every few seconds."""
    steps = run.config.training.steps
    last_log = 0.0
    with TrainingProgress(steps) as progress:

        def on_progress(record: Mapping[str, Any]) -> None:
            nonlocal last_log
            progress.report(record)
            now = time.monotonic()
            if record["step"] == steps or now - last_log >= LOG_EVERY_S:
                last_log = now
                log.info("  %s", describe_step(record, steps))

        return stage.train(run, on_progress)
