"""The task `publish`: the report, and what lasts of a run to the store."""

import time
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from forebay.run import RunContext
from forebay.storage import publish as storage
from forebay.telemetry import report
from forebay.telemetry.summary import add_publish_time
from tasks.artifacts import save_markdown

if TYPE_CHECKING:
    from forebay.evaluation.stage import EvaluationResult


@task(name="publish", cache_policy=NO_CACHE)
def publish(run: RunContext, summary: dict[str, Any], evaluation: "EvaluationResult") -> str:
    """Draw and write the report, publish, save the artifact `report`; returns the run's URI.

    `summary` is changed: its publish stage becomes the time until the summary is handed over to be published.
    """
    started = time.monotonic()
    report.write_report(run, summary)
    text = report.report_markdown(summary, evaluation)
    (run.root / "report.md").write_text(text, encoding="utf-8")
    add_publish_time(summary, time.monotonic() - started)
    uri = storage.publish(run, summary)
    save_markdown("report", f"Published at `{uri}`\n\n{text}", f"Report of {run.run_id}")
    return uri
