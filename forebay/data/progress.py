"""The progress bar of reading, on terminals only."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.data.dataset import OnRead


@contextmanager
def reading_bar(source: str) -> Iterator[OnRead]:
    """Shows rows read and the time that is left; gone at the end."""
    console = Console(stderr=True)
    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(source.rpartition("/")[2], total=None, rows=0)
        yield lambda done, total, rows: bar.update(task, completed=done, total=total, rows=rows)
