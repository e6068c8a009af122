"""What `forebay simulate` shows, and where it finds the run to calibrate from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forebay.config import StorageConfig
from forebay.errors import UserError
from forebay.simulation.calibrate import Measured
from forebay.simulation.model import Scenario
from forebay.simulation.result import SimulationResult
from forebay.storage.store import Store
from forebay.telemetry.ledger import located

FILE = "calibration.json"
_NEEDED = ("metrics.jsonl", "config.yaml")


@contextmanager
def run_folder(run: str, storage: StorageConfig) -> Iterator[tuple[Path, Path]]:
    """(the folder with the records of a run, where its calibration is to be written).

    `run` is its folder or its id, as for `forebay ledger`. A run that lies in the store only is copied to a temporary
    folder, its calibration goes to the scratch folder. Raises `UserError` if there is none.
    """
    with located(run, storage) as ledger:
        folder = ledger.parent
        if (folder / _NEEDED[0]).is_file():
            yield folder, folder / FILE
            return
        if Path(run).exists():
            raise UserError(f"{folder}: has no {_NEEDED[0]}: not a run's folder")
        store = Store(storage.uri, storage.endpoint_url)
        for name in _NEEDED:
            store.fetch_file(run, name, folder)
        target = Path(storage.scratch) / "calibrations" / f"{run}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        yield folder, target


def comparison(measured: Measured, result: SimulationResult) -> list[Sequence[str]]:
    """(what, measured, simulated, deviation) of a run and its simulation."""
    pairs = [
        ("step time", measured.step_time_s, result.step_time_s, "s"),
        ("trainer waits", measured.train_wait_ratio * measured.step_time_s, _wait_s(result), "s a step"),
        ("tokens", measured.tokens_per_s, result.tokens_per_s, "a second"),
    ]
    return [
        (name, f"{was:,.4g} {unit}", f"{is_:,.4g} {unit}", f"{deviation(is_, was):+.1%}")
        for name, was, is_, unit in pairs
    ]


def deviation(simulated: float, measured: float) -> float:
    """Relative to the measured value; infinite if that is 0 and the other is not."""
    if measured:
        return simulated / measured - 1
    return 0.0 if simulated == 0 else float("inf")


def lines(scenario: Scenario, result: SimulationResult) -> list[tuple[str, str]]:
    """(name, text) of a simulation."""
    bound, engine, rules = result.bound, scenario.engine, scenario.rules
    ages, tokens = result.staleness, result.token_staleness
    fates = ", ".join(f"{count:,} {fate}" for fate, count in result.fates.items() if count)
    tail = "" if bound.tail_s is None else f", longest response under the staleness bound {bound.tail_s:.4g} s"
    return [
        ("simulated", f"{rules.steps} steps of {rules.batch_groups} groups x {rules.group_size}, the last "
                      f"{len(result.step_times)} looked at"),
        ("engines", f"{scenario.engines} of {engine.slots} slots"),
        ("step time", f"{result.step_time_s:.4g} s, standard deviation {result.step_time_sd:.3g} s, "
                      f"autocorrelation {result.autocorrelation:+.2f}"),
        ("speed of light", f"{bound.step_time_s:.4g} s ({bound.binding}-bound: train {bound.train_s:.4g} s, rollout "
                           f"{bound.rollout_s:.4g} s{tail}); step time over it {result.over_bound:.3f}"),
        ("trainer waits", f"{result.train_wait_ratio:.1%} of the time, {_wait_s(result):.4g} s a step"),
        ("engines idle", f"{result.engine_idle:.1%}, paused {result.engine_paused:.1%}, empty slots "
                         f"{result.slots_idle:.1%}"),
        ("staleness", f"mean {ages.mean:.2f}, 95% {ages.p95}, max {ages.max}, bound {rules.staleness_bound}; of tokens "
                      f"mean {tokens.mean:.2f}, 95% {tokens.p95}"),
        ("queue", f"standard deviation {result.queue_sd:.2f} batches"),
        ("tokens", f"{result.tokens_per_s:,.0f}/s; {result.preempted_tokens:,} preempted, {result.recomputed_tokens:,} "
                   "computed again"),
        ("groups", fates),
    ]  # fmt: skip


def _wait_s(result: SimulationResult) -> float:
    return result.train_wait_ratio * result.step_time_s
