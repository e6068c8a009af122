"""The training stage: the one owner that wires Control Unit, engines, trainer and reward workers together.

Invariants: everything started here is ended here, in whatever way the stage ends; success is what the trainer's
completion record says, not an exit code; parts do not know each other or this module.
"""

import asyncio
import contextlib
import json
import socket
import statistics
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import RunConfig
from forebay.control.controller import Controller, Rules
from forebay.control.ledger import Entry
from forebay.control.recorder import Recorder
from forebay.control.server import control_app, serve
from forebay.control.source import Minibatch, scheduled
from forebay.control.types import Prompt
from forebay.control.unit import ControlUnit
from forebay.data.schema import read_rows
from forebay.errors import DeadlineError, RunError, UserError
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.launch.ports import hold_port, require_free
from forebay.launch.processes import Process, spawn
from forebay.rewards.pool import RewardPool
from forebay.run import RunContext
from forebay.scheduling.schedule import FILE, read_schedule
from forebay.training.launch import trainer_command

WATCH_S = 0.2
"""How often the trainer is looked after while the engines start."""
WARM_UP_STEPS = 1
"""First steps left out of step times and waits: the first batch waits for a cold pipeline to fill."""


@dataclass(frozen=True)
class TrainResult:
    """What a training did. Times in seconds."""

    steps: int
    wall_s: float
    step_times: list[float]
    """Of the steps after the first: wait + train + publish."""
    train_waits: list[float]
    """Of the same steps."""
    staleness_bound: int
    staleness_mean: float
    staleness_max: int
    fates: dict[str, int]
    """admitted = trained + filtered + stale + failed (+ in_flight, 0 at the end of a completed run)."""
    tokens_per_s: float
    """Response tokens delivered by all engines, over the time from the first step's end to the last's."""
    refreshes: int
    refresh_pause_s: float
    """Mean pause of an engine for one refresh."""


def train(run: RunContext, on_progress: Callable[[dict[str, Any]], None]) -> TrainResult:
    """Train `training.steps` steps; `on_progress` gets each step's record. Raises `ForebayError`."""
    return asyncio.run(_train(run, on_progress))


def rules_of(config: RunConfig) -> Rules:
    """The admission rule that a profile asks for."""
    return Rules(
        steps=config.training.steps,
        batch_groups=config.control.batch_groups,
        group_size=config.generation.group_size,
        sync_every=config.control.sync_every,
        max_staleness=config.staleness_bound,
        work_in_progress=config.work_in_progress,
        max_concurrent_samples=config.control.max_concurrent_samples,
        stale=config.control.stale,
        dynamic_sampling=config.control.dynamic_sampling,
    )


async def _train(run: RunContext, on_progress: Callable[[dict[str, Any]], None]) -> TrainResult:
    config = run.config
    controller = Controller(rules_of(config), _prompts(run))
    cores = plan_cores(config)
    async with contextlib.AsyncExitStack() as stack:
        held = stack.enter_context(_control_port(config))
        scorer = stack.enter_context(contextlib.closing(_reward_pool(run)))
        recorder = stack.enter_context(contextlib.closing(Recorder(run.metrics, on_progress)))
        fleet = Fleet(run, run.start_model, cores)
        unit = ControlUnit(
            controller,
            fleet,
            scorer,
            recorder,
            seed=config.seed,
            stall_timeout_s=config.control.stall_timeout_s,
            step_timeout_s=config.training.step_timeout_s,
            max_restarts=config.generation.max_restarts,
        )
        await stack.enter_async_context(serve(control_app(unit, run.token), held))
        trainer = _start_trainer(run, _url(held), cores.trainer)
        stack.callback(trainer.stop, 5.0)
        await _unless_dead(trainer, stack.enter_async_context(fleet))
        try:
            await unit.run(lambda: _check(trainer, unit, config.training.startup_timeout_s))
        finally:
            _write_groups(run, controller.ledger.entries)
        await _trainer_done(run, trainer)
        return _result(controller, recorder)


def _reward_pool(run: RunContext) -> RewardPool:
    reward = run.config.reward
    return RewardPool(reward.name, run.start_model, reward.workers, reward.timeout_s, reward.truncated)


def _control_port(config: RunConfig) -> socket.socket:
    """The Control Unit's port, held from now on: the engines' start takes long enough for others to want it."""
    host, port = config.launch.host, config.control.port
    if port:
        require_free(host, port, "control.port")
    return hold_port(host, port)


def _url(held: socket.socket) -> str:
    host, port = held.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _start_trainer(run: RunContext, url: str, cores: list[int] | None) -> Process:
    argv, env, _ = trainer_command(run, url, cores)
    return spawn("trainer", argv, env=env, log=run.logs / "trainer.log", cores=cores)


def _prompts(run: RunContext) -> Iterator[Minibatch]:
    rows = {row.prompt_id: row for row in read_rows(run.data / "train.parquet")}
    groups = read_schedule(run.schedule / FILE)

    def prompt(prompt_id: str, predicted: float) -> Prompt:
        row = rows[prompt_id]
        return Prompt(prompt_id, tuple(row.prompt_ids), row.prompt, row.answer, predicted)

    minibatches = [[tuple(prompt(*item) for item in minibatch) for minibatch in group] for group in groups]
    return scheduled(minibatches, run.config.seed)


def _require_alive(trainer: Process) -> None:
    code = trainer.poll()
    if code is not None:
        kind = UserError if code == UserError.exit_code else RunError
        raise kind(f"the trainer {trainer.describe_exit()}: {trainer.log_tail(1).strip() or 'it said nothing'}")


async def _unless_dead(trainer: Process, start: Awaitable[object]) -> None:
    """Wait for the engines' start, but not if the trainer has died meanwhile."""
    starting = asyncio.ensure_future(start)
    try:
        while not starting.done():
            await asyncio.wait([starting], timeout=WATCH_S)
            _require_alive(trainer)
        await starting
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


def _check(trainer: Process, unit: ControlUnit, startup_timeout_s: float) -> None:
    """Raises if the trainer has died, or has not asked for its first batch in time."""
    _require_alive(trainer)
    if not unit.trainer_seen and trainer.age_s > startup_timeout_s:
        raise DeadlineError(
            f"the trainer has not asked for a batch {startup_timeout_s:g} s after its start "
            f"(training.startup_timeout_s); its last words: {trainer.log_tail(1).strip() or 'none'}"
        )


async def _trainer_done(run: RunContext, trainer: Process) -> None:
    """Wait for the trained model; the completion record decides."""
    limit = run.config.training.step_timeout_s
    record = run.root / "trainer_done.json"
    try:
        async with asyncio.timeout(limit):
            while not record.exists():
                if trainer.poll() is not None and not record.exists():
                    _require_alive(trainer)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise DeadlineError(f"the trainer did not write the trained model within {limit:.0f} s") from None
    done = json.loads(record.read_text())
    if done["steps"] != run.config.training.steps:
        raise RunError(f"the trainer stopped after {done['steps']} steps: {done.get('reason', 'no reason given')}")


def _result(controller: Controller, recorder: Recorder) -> TrainResult:
    steady = recorder.steps[WARM_UP_STEPS:] or recorder.steps
    first, last = recorder.steps[0], recorder.steps[-1]
    seconds = last["t"] - first["t"] if len(recorder.steps) > 1 else last["t"]
    tokens = recorder.tokens - (first["tokens_generated"] if len(recorder.steps) > 1 else 0)
    return TrainResult(
        steps=len(recorder.steps),
        wall_s=recorder.elapsed,
        step_times=[step["step_time_s"] for step in steady],
        train_waits=[step["train_wait_s"] for step in steady],
        staleness_bound=controller.rules.staleness_bound,
        staleness_mean=statistics.fmean(recorder.staleness) if recorder.staleness else 0.0,
        staleness_max=max(recorder.staleness, default=0),
        fates=controller.ledger.fates(),
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        refreshes=len(recorder.pauses),
        refresh_pause_s=statistics.fmean(recorder.pauses) if recorder.pauses else 0.0,
    )


def _write_groups(run: RunContext, entries: list[Entry]) -> None:
    """groups.parquet: one row for each group that has its fate."""
    rows = [
        {
            "group_id": entry.group_id,
            "prompt_id": entry.prompt.prompt_id,
            "fate": entry.fate.value,
            "reason": entry.reason,
            "predicted_length": entry.prompt.predicted_length,
            "lengths": [len(sample.ids) for sample in entry.samples],
            "reward_mean": statistics.fmean(entry.rewards) if entry.rewards else None,
            "oldest_version": entry.oldest_version,
            "trained_version": entry.trained_version,
            "staleness": entry.staleness,
            "attempts": entry.attempts,
        }
        for entry in entries
    ]
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), run.root / "groups.parquet")
