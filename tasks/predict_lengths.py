"""The task `predict_lengths`: predicted response lengths, and the schedule made of them."""

import dataclasses
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from forebay.lengths import stage as lengths_stage
from forebay.run import RunContext
from forebay.scheduling import schedule as schedule_stage
from tasks.artifacts import save_table

if TYPE_CHECKING:
    from forebay.lengths.stage import LengthsResult
    from forebay.scheduling.schedule import ScheduleResult


@task(name="predict_lengths", cache_policy=NO_CACHE)
def predict_lengths(run: RunContext) -> "tuple[LengthsResult, ScheduleResult]":
    """Profile and predict, then order the prompts; saves the artifact `response-lengths`."""
    lengths = lengths_stage.predict_lengths(run)
    schedule = schedule_stage.make_schedule(run)
    rows = [{"quantity": name, "value": value} for name, value in {**_numbers(lengths), **_numbers(schedule)}.items()]
    save_table("response-lengths", rows, f"Response lengths and schedule of {run.run_id}")
    return lengths, schedule


def _numbers(result: Any) -> dict[str, float]:
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}
