"""`forebay ...`: the command line.

Invariants:
- `forebay --help` imports neither torch, Prefect nor vLLM: commands import what they need when they run.
- Expected failures are one line on stderr and an exit code (2: the user's mistake, 1: ours or the machine's,
  130: interrupted); a traceback means a bug.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay import __version__
from forebay.command_line import ProfileArgument, SetOption, guarded, print_pairs
from forebay.data.commands import app as data_app
from forebay.evaluation.commands import evaluate

if TYPE_CHECKING:
    from forebay.config import RunConfig
    from forebay.run import RunContext

app = typer.Typer(
    name="forebay",
    help="Reinforcement-learning post-training of language models as a pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


def main() -> None:
    """Entry point of the `forebay` script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@guarded
def run(profile: ProfileArgument, set_: SetOption = None) -> None:
    """Run the whole pipeline of a profile: data, lengths, training, evaluation, publication."""
    from forebay.config import load_profile
    from forebay.doctor import preflight

    config = load_profile(profile, set_ or ())
    preflight(config)
    from flows.local import run_pipeline

    show_summary(run_pipeline(config), config.storage.uri)


@app.command()
@guarded
def doctor(
    profile: Annotated[
        Path | None, typer.Argument(metavar="[PROFILE]", help="Also check what this profile needs.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Check this machine: what is here, what is missing, what to do. Exit code 1 if a run could not start."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from forebay.config import RunConfig, load_profile
    from forebay.doctor import examine
    from forebay.errors import UserError

    if profile is None and set_:
        raise UserError("--set changes a profile: name one")
    checks = examine(load_profile(profile, set_ or ()) if profile else RunConfig())
    table = Table("", "check", "here", "what to do", show_edge=False)
    for check in checks:
        mark, style = ("ok", "green") if check.ok else ("missing", "red") if check.error else ("note", "yellow")
        table.add_row(Text(mark, style), check.name, Text(check.detail), Text("" if check.ok else check.fix))
    Console().print(table)
    if any(not check.ok and check.error for check in checks):
        raise typer.Exit(1)


@app.command()
@guarded
def config(profile: ProfileArgument, set_: SetOption = None) -> None:
    """Check a profile and print every setting of it, defaults included, as YAML. Starts nothing."""
    import yaml

    from forebay.config import load_profile

    typer.echo(yaml.safe_dump(load_profile(profile, set_ or ()).model_dump(), sort_keys=False), nl=False)


@app.command()
@guarded
def lengths(profile: ProfileArgument, set_: SetOption = None) -> None:
    """Profile response lengths, fit the predictor and print how well lengths can be told before a run."""
    from forebay.lengths.report import lines
    from forebay.lengths.stage import predict_lengths

    run = _prepared(profile, set_)
    print_pairs(lines(run, predict_lengths(run)))


def _prepared(profile: Path, set_: list[str] | None) -> "RunContext":
    """A fresh run with its data; assumed lengths need none."""
    from forebay.config import load_profile
    from forebay.data.prepare import prepare_data
    from forebay.doctor import preflight
    from forebay.run import RunContext

    config = load_profile(profile, set_ or ())
    if config.lengths.assumed is not None:
        return RunContext.create(config)
    preflight(config)
    run = RunContext.create(config)
    prepare_data(run)
    return run


@app.command()
@guarded
def schedule(profile: ProfileArgument, set_: SetOption = None) -> None:
    """Order the prompts of a profile by predicted length, as a run would, and print how even the order is."""
    import time

    from forebay.lengths.stage import predict_lengths
    from forebay.scheduling.schedule import FILE, lines, make_schedule

    run = _prepared(profile, set_)
    predict_lengths(run)
    started = time.monotonic()
    result = make_schedule(run)
    seconds = time.monotonic() - started
    print_pairs([*lines(result), ("made in", f"{seconds:.2f} s"), ("written to", str(run.schedule / FILE))])


@app.command()
@guarded
def simulate(
    profile: ProfileArgument,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Take costs and response lengths from this run (id or folder), and compare with it.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Instead of training.steps.")] = None,
    set_: SetOption = None,
) -> None:
    """Play a profile on virtual engines and a virtual trainer, with the real control code. Starts nothing."""
    from forebay.config import load_profile
    from forebay.simulation.calibrate import calibrate as calibrated
    from forebay.simulation.progress import shown
    from forebay.simulation.report import comparison, lines, run_folder
    from forebay.simulation.run import simulate as play
    from forebay.simulation.scenario import assumptions, scenario_of

    config, calibration = load_profile(profile, set_ or ()), None
    if calibrate is not None:
        with run_folder(calibrate, config.storage) as (folder, target):
            calibration = calibrated(folder)
            calibration.save(target)
    with shown("drawing lengths and ordering the prompts") as progress:
        scenario = scenario_of(config, calibration, steps=steps)
        progress.begin("simulating", scenario.rules.steps)
        result = play(scenario, progress=progress)
    if calibration is not None:
        _print_table(("", "measured", "simulated", "deviation"), comparison(calibration.measured, result))
    told = [("assumed", line) for line in assumptions(config, calibration, steps)]
    print_pairs([*lines(scenario, result), *told])


app.command()(evaluate)


@app.command()
@guarded
def ledger(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or its folder (published ones too).")],
    group: Annotated[int | None, typer.Option("--group", metavar="ID", help="Show this one group.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="PROFILE", help="Look where this profile stores its runs."),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Print the account of a run's groups: each one's fate, the reasons, staleness and attempts."""
    from forebay.config import RunConfig, load_profile
    from forebay.errors import UserError
    from forebay.telemetry.ledger import (
        account,
        account_lines,
        detail_lines,
        group_lines,
        located,
        one_group,
        read_ledger,
    )

    if profile is None and set_:
        raise UserError("--set changes a profile: name one")
    config = load_profile(profile, set_ or ()) if profile else RunConfig()
    with located(run, config.storage) as path:
        table = read_ledger(path)
    if group is not None:
        print_pairs(group_lines(one_group(table, group)))
        return
    summed = account(table)
    _print_table(("fate", "groups", "tokens", "mean reward"), account_lines(summed), summed=True)
    print_pairs(detail_lines(summed))


@app.command()
@guarded
def plan(
    profile: ProfileArgument,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", help="Devices for engines and trainer together.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate the memory on each device instead; refuse a profile that cannot fit."),
    ] = False,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots, which stands alone.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate", metavar="RUN", help="Take costs and response lengths from this run (id or folder)."
        ),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Compare splits of the devices, modes, policies and staleness bounds by simulation, and say which to take; or
    tell whether a profile fits its devices' memory."""
    from forebay.config import load_profile
    from forebay.errors import UserError

    config = load_profile(profile, set_ or ())
    if dry_run:
        given = {"--devices": devices, "--html": page, "--calibrate": calibrate}
        if ignored := [name for name, value in given.items() if value is not None]:
            raise UserError(f"plan --dry-run simulates nothing: leave out {', '.join(ignored)}, or --dry-run")
        _print_memory(config)
        return
    if devices is None:
        raise UserError("plan: say how many devices there are (--devices N), or ask for the memory (--dry-run)")
    from forebay.simulation.calibrate import calibrate as calibrated
    from forebay.simulation.plan import make_plan
    from forebay.simulation.plan_page import COLUMNS, advice, cells, check_page, left_out, write_page
    from forebay.simulation.progress import shown
    from forebay.simulation.report import run_folder

    if page is not None:
        check_page(page)
    calibration = None
    if calibrate is not None:
        with run_folder(calibrate, config.storage) as (folder, _):
            calibration = calibrated(folder)
    with shown("looking at the splits") as progress:
        made = make_plan(config, devices, calibration, progress)
    if page is not None:
        write_page(made, page)
    _print_plan(COLUMNS, [(cells(line), line is made.best) for line in made.lines])
    for text in (left_out(made), advice(made)):
        if text:
            typer.echo(f"{text}\n")
    print_pairs([("" if number else "taken for granted", line) for number, line in enumerate(made.assumptions)])


def _print_memory(config: "RunConfig") -> None:
    """Exit code 2 after the tables if something does not fit."""
    from rich.console import Console
    from rich.table import Table

    from forebay.memory.fit import check, dry_run, verdict

    estimate, console = dry_run(config), Console()
    console.width = max(console.width, 120)  # never cut
    for fleet in estimate.fleets:
        table = Table(f"{fleet.name} x {fleet.devices}", show_edge=False)
        for name in ("GiB a device", "GiB a host"):
            table.add_column(name, justify="right")
        table.add_column("what it is")
        for cells in fleet.rows():
            table.add_row(*cells)
        table.rows[-2].end_section = True
        console.print(table)
        console.print()
    check(estimate)
    print_pairs([("memory", verdict(config, estimate))])


def _print_plan(columns: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> None:
    """The row to take is bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("mode", "policy", "binds") else "right", no_wrap=True)
    for row, taken in rows:
        table.add_row(*row, style="bold" if taken else "")
    console = Console()
    console.width = max(console.width, 160)  # never cut
    console.print(table)
    console.print()


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], summed: bool = False) -> None:
    """`summed`: the last row is set off."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns[:1], show_edge=False)
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row, end_section=summed and row is rows[-2])
    Console().print(table)
    Console().print()


def show_summary(summary: Mapping[str, Any], storage_uri: str) -> None:
    """Print a run's `summary.json` as a table, and where it lies."""
    print_pairs(summary_rows(summary, storage_uri))


def summary_rows(summary: Mapping[str, Any], storage_uri: str) -> list[tuple[str, str]]:
    """(name, value) lines of the closing table; what a run could not measure is a dash."""
    evaluation, staleness = summary.get("evaluation") or {}, summary.get("staleness") or {}
    before, after, n = (evaluation.get(key) for key in ("before", "after", "n"))
    fates = (summary.get("fates") or {}).items()
    place = f"{storage_uri.removeprefix('file://').rstrip('/')}/{summary['run_id']}"
    return [
        ("run", f"{summary['run_id']}, {summary['status']}, {summary['mode']}, {_number(summary.get('wall_s'), 's')}"),
        ("accuracy", f"{_number(before, '', 3)} -> {_number(after, '', 3)} on {_number(n)} held-out prompts"),
        ("p-value", "-" if evaluation.get("p_value") is None else f"{evaluation['p_value']:.2g}"),
        ("step time", f"{_number(summary.get('step_time_s'), 's', 2)} median"),
        ("waiting for data", "-" if summary.get("train_wait_ratio") is None else f"{summary['train_wait_ratio']:.0%}"),
        ("engines idle", _idle_text(summary.get("engines") or {})),
        ("tokens", f"{_number(summary.get('tokens_per_s'))}/s"),
        (
            "staleness",
            f"mean {_number(staleness.get('mean'), '', 2)}, 95% {_number(staleness.get('p95'))}, "
            f"max {_number(staleness.get('max'))}, bound {_number(staleness.get('bound'))}",
        ),
        ("weight refresh", _refresh_text(summary.get("refresh") or {})),
        ("restarts", _restarts_text(summary)),
        ("groups", ", ".join(f"{count} {fate}" for fate, count in fates) or "-"),
        ("report", f"{place}/report.png"),
        ("summary", f"{place}/summary.json"),
        ("trained model", f"{place}/model"),
    ]


def _refresh_text(refresh: Mapping[str, Any]) -> str:
    if not refresh.get("count"):
        return "-"
    pause, share = refresh.get("pause_mean_s"), refresh.get("pause_share_of_step")
    paused = f", pause {1000 * pause:.0f} ms" if pause is not None else ""
    paused += f" ({share:.1%} of a step)" if share is not None else ""
    tokens = (
        f"{_number(refresh.get('tokens_recomputed'))} recomputed, {_number(refresh.get('tokens_discarded'))} discarded"
    )
    return f"{refresh['count']} x {refresh['mode']}{paused}; tokens: {tokens}"


def _idle_text(engines: Mapping[str, Any]) -> str:
    """Of several engines also each one's share."""
    shares = [engine["idle_ratio"] for engine in engines.get("each") or ()]
    if engines.get("idle_ratio") is None or None in shares:
        return "-"
    each = f" ({', '.join(f'{share:.0%}' for share in shares)})" if len(shares) > 1 else ""
    return f"{engines['idle_ratio']:.0%}{each}"


def _restarts_text(summary: Mapping[str, Any]) -> str:
    counts = [(name, (summary.get(name) or {}).get("restarts")) for name in ("engines", "trainer")]
    return ", ".join(f"{name} {count}" for name, count in counts if count is not None) or "-"


def _number(value: float | None, unit: str = "", digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f} {unit}".rstrip()
