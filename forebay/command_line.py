"""What all commands share: their common arguments, how they fail, how they print."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from forebay.errors import ForebayError

INTERRUPTED = 130
OWN_PACKAGES = ("", "forebay", "flows", "tasks")
"""A module missing from these is a bug; any other one means that the installation is not complete."""

P = ParamSpec("P")
T = TypeVar("T")

ProfileArgument = Annotated[Path, typer.Argument(metavar="PROFILE", help="YAML file with the settings of a run.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, for example training.steps=20. Repeatable."),
]


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Turn expected failures into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except ForebayError as error:
            for line in str(error).splitlines():
                typer.echo(f"forebay: {line}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("forebay: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in OWN_PACKAGES:
                raise
            from forebay.doctor import INSTALL

            typer.echo(f"forebay: {package} is not installed: {INSTALL}", err=True)
            raise typer.Exit(2) from None

    return run


def print_pairs(lines: Iterable[tuple[str, str]]) -> None:
    """(name, value) lines as a table; values are never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # never cut: the paths are there to be copied
    for name, value in lines:
        table.add_row(Text(name, "bold"), Text(value))
    Console().print(table)
