"""`forebay evaluate`. Imports nothing heavy before it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.command_line import ProfileArgument, SetOption, guarded
from forebay.errors import UserError

if TYPE_CHECKING:
    from forebay.run import RunContext


@guarded
def evaluate(
    profile: ProfileArgument,
    model: Annotated[
        Path, typer.Option("--model", metavar="FOLDER", help="The trained model: the folder `model` of a run.")
    ],
    set_: SetOption = None,
) -> None:
    """Compare a trained model with the start model of a profile on its test prompts, as a run does at its end.

    `forebay evaluate RUN/config.yaml --model RUN/model` repeats the evaluation of a published run: same prompts, same
    seeds; compare the digest of test.parquet.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from forebay.evaluation.stage import evaluate as compare
    from forebay.evaluation.table import evaluation_markdown

    run = _prepared(profile, set_, model)
    result = compare(run)
    Console().print(Markdown(evaluation_markdown(result)))
    typer.echo(f"\nwritten to {run.root / 'evaluation.json'} and evaluation_samples.parquet beside it")


def _prepared(profile: Path, set_: list[str] | None, model: Path) -> "RunContext":
    from forebay.config import load_profile
    from forebay.data.prepare import prepare_data
    from forebay.doctor import preflight
    from forebay.run import RunContext

    config = load_profile(profile, set_ or ())
    if not (model / "manifest.json").is_file():
        raise UserError(f"--model {model}: no manifest.json there; name the folder `model` of a run")
    preflight(config)
    run = RunContext.create(config)
    prepare_data(run)
    run.trained_model.symlink_to(model.resolve())
    return run
