"""The modes against each other and against what engine and trainer can do alone, in one run on one machine.

    python -m benchmarks.modes [--steps 30] [--rounds 1]

Each round measures, in turn, so that a slow minute of the machine hits all of them: `sync`, `one_step_off`,
`fully_async`, and then the two bounds. *Generate only*: the engines without trainer and refresh, kept at the number of
groups that `fully_async` had in flight. *Train only*: the trainer fed at once with the very batches that `fully_async`
trained. No schedule of both can need less per step than the longer of the two. All use the same data and start model.

Settings, each with bounds of its own:
- *quickstart*: the profile as it is. On a machine with few cores neither runs alone there: API server, Control Unit and
  reward workers need the same cores, and alone the engine has all of them. So a third bound is shown, *work over
  cores*: the CPU seconds that all processes of the run used per step, over the cores.
- *own_cores*: engine (with its API server) and trainer each on cores of their own (`OWN_CORES`), the trainer streaming
  as is the default (the profile's trainer, which has to share, takes whole batches: a batch that leaves at once lets a
  batch of new groups in at once, and the engine's decoding steps are by turns too full and too empty), refreshed in
  place: what the project promises to keep near the bound. *own_cores_retract*: the same with the profile's own
  refresh, whose recomputed caches are not in the bound.
- *balanced*: as *own_cores*, with loads that are about equal, where overlap pays most: the quickstart is bound by
  generation, so the trainer gets small micro-batches and keeps no activations (`BALANCED`), which costs it more time
  for the same result. `generate_over_train_balanced` says how near to 1 that is; `--balance` tries something else
  (settings of generation, control and training only: the data are shared).

Step times are means over the steady steps (the first and last `EDGE` are left out: filling, draining), of wall time
from one step's end to the next one's. Generation gets longer or shorter as the policy learns, so *generate only* is
its token rate applied to the tokens that `fully_async` generated per step.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.alone import Batches, generate_only, recorded_batches, train_only
from benchmarks.results import report
from forebay.config import load_profile
from forebay.data.prepare import prepare_data
from forebay.lengths.stage import predict_lengths
from forebay.run import RunContext
from forebay.scheduling.schedule import make_schedule
from forebay.telemetry.metrics import read_metrics
from forebay.train import train

MODES = ("sync", "one_step_off", "fully_async")
OWN_CORES = ("launch.pin_api_servers=true", "control.refresh=in_place", "training.streaming=auto")
BALANCED = ("training.micro_batch_tokens=256", "training.activation_checkpointing=true")
EDGE = 3
"""Steps left out at either end."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a profile with changes, in some modes."""

    name: str
    modes: tuple[str, ...]
    overrides: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="profiles/quickstart_cpu.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all settings")
    parser.add_argument("--balance", action="append", metavar="KEY=VALUE", help=f"instead of {' '.join(BALANCED)}")
    args = parser.parse_args()
    if args.steps < 2 * EDGE + 2:
        parser.error(f"--steps must be {2 * EDGE + 2} or more: the first and last {EDGE} are left out")
    own_cores = (*args.set, *OWN_CORES)
    settings = [
        Setting("quickstart", MODES, tuple(args.set)),
        Setting("own_cores", ("sync", "fully_async"), own_cores),
        Setting("own_cores_retract", ("fully_async",), (*own_cores, "control.refresh=retract")),
        Setting("balanced", ("sync", "fully_async"), (*own_cores, *(args.balance or BALANCED))),
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(args.profile, settings, args.steps, args.rounds, Path(folder))
    report("modes", f"{args.profile}: {args.steps} steps, {args.rounds} rounds", rows, outcome(rows))


def compare(profile: str, settings: Sequence[Setting], steps: int, rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """All measurements, one row each; columns that do not apply are None."""
    _share_cache(load_profile(profile).storage.scratch, scratch)

    def context(mode: str, overrides: Sequence[str]) -> RunContext:
        given = [*overrides, f"mode={mode}", f"training.steps={steps}", f"storage.scratch={scratch}"]
        return RunContext.create(load_profile(profile, given))

    base = context("fully_async", settings[0].overrides)
    prepare_data(base)
    predict_lengths(base)
    make_schedule(base)
    rows = []
    for turn in range(rounds):
        for setting in settings:

            def fresh(mode: str, overrides: Sequence[str] = setting.overrides) -> RunContext:
                run = context(mode, overrides)
                for name in ("data", "start_model", "lengths", "schedule"):
                    shutil.copytree(base.root / name, run.root / name)
                return run

            for measured in measure(setting, fresh):
                rows.append({"setting": setting.name, "round": turn, **measured})
    return rows


def measure(setting: Setting, fresh: Any) -> list[dict[str, Any]]:
    """The modes of a setting and the two bounds of its `fully_async`; `fresh(mode)` makes a run."""
    rows: list[dict[str, Any]] = []
    batches: Batches = {}
    for mode in setting.modes:
        run = fresh(mode)
        with recorded_batches(batches := {}):
            rows.append({"what": mode, **trained(run)})
    reference = rows[-1]  # fully_async comes last
    rate = generate_only(fresh("fully_async"), max(1, round(reference["in_flight_groups"])))
    rows.append(_alone("generate_only", reference["tokens_per_step"] / rate, tokens_per_s=rate))
    times = train_only(fresh("fully_async"), batches)
    rows.append(_alone("train_only", statistics.fmean(times[EDGE:-EDGE])))
    return rows


def trained(run: RunContext) -> dict[str, Any]:
    """The row of a training."""
    used: list[float] = []
    result = train(run, lambda record: used.append(cpu_seconds()))
    return {**steady(run), "work_over_cores_s": work_over_cores(used), **_kept(result)}


def steady(run: RunContext) -> dict[str, Any]:
    """Of the steady steps of a run, from its metrics."""
    metrics = read_metrics(run.metrics)
    steps = metrics.steps[EDGE - 1 : -EDGE]
    first, last = steps[0], steps[-1]
    seconds, count = last["t"] - first["t"], len(steps) - 1
    tokens = last["tokens_generated"] - first["tokens_generated"]
    # A run without a record in the window (shorter than the period of observation) was never seen idle.
    seen = [record["in_flight"] for record in metrics.queue if first["t"] < record["t"] <= last["t"]] or [1]
    return {
        "step_time_s": seconds / count,
        "train_wait_ratio": sum(step["train_wait_s"] for step in steps[1:]) / seconds,
        "engines_idle_ratio": sum(groups == 0 for groups in seen) / len(seen),
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / count,
        "in_flight_groups": statistics.fmean(seen),
    }


def cpu_seconds() -> float:
    """That this process and all its living descendants have used until now."""
    me, total = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def work_over_cores(used: Sequence[float]) -> float:
    """Seconds that a step takes at least if its work were spread evenly over the cores; `used` at each step's end."""
    window = used[EDGE - 1 : -EDGE]
    return (window[-1] - window[0]) / (len(window) - 1) / len(os.sched_getaffinity(0))


Measured = dict[str, dict[str, Any]]
"""What was measured -> its row, of one setting in one round."""


def outcome(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds: step times by setting, and ratios of what was measured in the same round, one soon after
    the other. What the project promises: the first ratio and `sync_over_fully_async_balanced`."""
    settings: dict[str, dict[int, Measured]] = {}
    for row in rows:
        settings.setdefault(row["setting"], {}).setdefault(row["round"], {})[row["what"]] = row

    def median(setting: str, value: Callable[[Measured], float]) -> float:
        return statistics.median(map(value, settings[setting].values()))

    def each(setting: str, name: str, among: Sequence[str]) -> dict[str, float]:
        return {what: median(setting, lambda own, what=what: own[what][name]) for what in among}  # type: ignore[misc]

    return {
        "fully_async_over_bound": median("own_cores", over_bound),
        "fully_async_over_bound_retract": median("own_cores_retract", over_bound),
        "fully_async_over_bound_shared_cores": median("quickstart", over_bound),
        "fully_async_over_work": median("quickstart", over_work),
        "generate_over_train_balanced": median("balanced", generate_over_train),
        "sync_over_fully_async": median("quickstart", sync_over_async),
        "sync_over_fully_async_own_cores": median("own_cores", sync_over_async),
        "sync_over_fully_async_balanced": median("balanced", sync_over_async),
        "fully_async_over_bound_rounds": [over_bound(own) for own in settings["own_cores"].values()],
        "step_time_s": {name: each(name, "step_time_s", list(own[0])) for name, own in settings.items()},
        "train_wait_ratio": each("quickstart", "train_wait_ratio", MODES),
        "engines_idle_ratio": each("quickstart", "engines_idle_ratio", MODES),
    }


def over_bound(own: Measured) -> float:
    """A step of `fully_async` over the longer of what its engines and its trainer need alone."""
    bound = max(own["generate_only"]["step_time_s"], own["train_only"]["step_time_s"])
    return float(own["fully_async"]["step_time_s"] / bound)


def over_work(own: Measured) -> float:
    """A step of `fully_async` over the CPU seconds that it takes, shared by all cores."""
    return float(own["fully_async"]["step_time_s"] / own["fully_async"]["work_over_cores_s"])


def generate_over_train(own: Measured) -> float:
    """1 where both loads are equal."""
    return float(own["generate_only"]["step_time_s"] / own["train_only"]["step_time_s"])


def sync_over_async(own: Measured) -> float:
    """How many times faster `fully_async` is."""
    return float(own["sync"]["step_time_s"] / own["fully_async"]["step_time_s"])


def _kept(result: Any) -> dict[str, Any]:
    return {
        "staleness_mean": result.staleness.mean,
        "staleness_max": result.staleness.max,
        "staleness_bound": result.staleness_bound,
        "refresh_pause_s": result.refresh_pause_s,
        **{fate: count for fate, count in result.fates.items() if fate not in ("admitted", "in_flight")},
    }


def _alone(what: str, step_time_s: float, **values: float) -> dict[str, Any]:
    return {"what": what, "step_time_s": step_time_s, **values}


def _share_cache(usual: str, scratch: Path) -> None:
    """Let the start model come from the cache of ordinary runs, and stay there."""
    cache = Path(usual).resolve() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (scratch / "cache").symlink_to(cache)


if __name__ == "__main__":
    main()
