"""The task `prepare_data`: canonical rows and the start model."""

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from forebay.data import prepare as stage
from forebay.run import RunContext

if TYPE_CHECKING:
    from forebay.data.prepare import PreparedData


# NO_CACHE: stages find earlier work by content under `run.cache`; Prefect's keys know nothing of a profile's files.
@task(name="prepare_data", cache_policy=NO_CACHE)
def prepare_data(run: RunContext) -> "PreparedData":
    """See `forebay.data.prepare.prepare_data`."""
    return stage.prepare_data(run)
