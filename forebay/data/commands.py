"""`forebay data ...`. Imports nothing heavy before a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.command_line import ProfileArgument, SetOption, guarded, print_pairs

app = typer.Typer(help="Look at data, and prepare it.", no_args_is_help=True)


@app.command()
@guarded
def inspect(
    source: Annotated[str, typer.Argument(metavar="FILE", help="File, directory, s3:// URI or name on the hub.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="Read it as this profile would (data.columns).")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Say what is in a file, what Forebay would do with it, and what to put right. Exit code 1 if no row is of use."""
    import tempfile

    from forebay.config import load_profile
    from forebay.data.inspect import inspect as look

    config = load_profile(profile, set_ or ())
    with tempfile.TemporaryDirectory() as cache:
        lines = look(source, config, Path(cache))
    print_pairs(lines)
    if ("would take", "0 rows") in lines:
        raise typer.Exit(1)


@app.command()
@guarded
def prepare(profile: ProfileArgument, set_: SetOption = None) -> None:
    """Prepare the data of a profile as a run would: rows, splits, quarantine. Starts no engine and no training."""
    from forebay.config import load_profile
    from forebay.data.prepare import prepare_data
    from forebay.data.report import lines
    from forebay.run import RunContext

    run = RunContext.create(load_profile(profile, set_ or ()))
    print_pairs(lines(run, prepare_data(run)))
