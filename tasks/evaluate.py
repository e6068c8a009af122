"""The task `evaluate`: the start model against the trained one, on held-out prompts."""

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from forebay.evaluation import stage
from forebay.run import RunContext
from tasks.artifacts import save_table

if TYPE_CHECKING:
    from forebay.evaluation.stage import EvaluationResult


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(run: RunContext) -> "EvaluationResult":
    """See `forebay.evaluation.stage.evaluate`; saves the artifact `evaluation`."""
    result = stage.evaluate(run)
    rows = [
        {"model": "start", "score": result.before, "test prompts": result.n},
        {"model": "trained", "score": result.after, "test prompts": result.n},
    ]
    save_table("evaluation", rows, f"Greedy scores of {run.run_id}, p = {result.p_value:.3g}")
    return result
