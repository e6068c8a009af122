"""The training stage: the one owner that wires Control Unit, engines, trainer and reward workers together.

Invariants: everything started here is ended here, in whatever way the stage ends; success is what the trainer's
completion record says, not an exit code; parts do not know each other or this module.
"""

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from forebay.config import RunConfig
from forebay.control.controller import Controller
from forebay.control.recorder import Ages, Recorder
from forebay.control.rules import rules_of
from forebay.control.server import control_app, serve
from forebay.control.source import Minibatch, scheduled
from forebay.control.types import Prompt
from forebay.control.unit import ControlUnit, Patience
from forebay.data.schema import Row, read_rows
from forebay.errors import DeadlineError, ForebayError, RunError, UserError
from forebay.evaluation.during import HeldOut
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.launch.ports import hold_port, require_free
from forebay.launch.processes import spawn
from forebay.rewards.pool import RewardPool
from forebay.rewards.tally import Tally
from forebay.run import RunContext
from forebay.scheduling.policies import sorted_steps
from forebay.scheduling.schedule import FILE, read_schedule
from forebay.telemetry.learning import learning_of
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
    staleness: Ages
    """Of trained groups: versions between the oldest token and the training."""
    sample_staleness: Ages
    """Of trained responses."""
    token_staleness: Ages
    """Of trained tokens."""
    fates: dict[str, int]
    """admitted = trained + filtered + stale + failed (+ in_flight, 0 at the end of a completed run)."""
    tokens_per_s: float
    """Response tokens delivered by all engines, over the time from the first step's end to the last's."""
    refreshes: int
    refresh_pause_s: float
    """Mean pause of an engine for one refresh."""
    refresh_pause_max_s: float
    tokens_recomputed: int
    """Tokens whose KV cache was computed again after refreshes."""
    tokens_discarded: int
    """Response tokens that were generated and thrown away: aborted, stale, or of engines that died."""
    engine_restarts: int
    trainer_restarts: int
    learning: dict[str, Any]
    """See `learning_of`."""
    verdicts: dict[str, int]
    """Responses by their verifier's verdict."""
    examinations: list[dict[str, Any]]
    """Held-out answers during training (`forebay.evaluation.during`), in the order in which they were done."""
    reward_warnings: dict[str, int]
    """Batches by the warning about them, see `forebay.rewards.tally`."""


def train(run: RunContext, on_progress: Callable[[dict[str, Any]], None]) -> TrainResult:
    """Train `training.steps` steps; `on_progress` gets each step's record. Raises `ForebayError`."""
    return asyncio.run(_train(run, on_progress))


async def _train(run: RunContext, on_progress: Callable[[dict[str, Any]], None]) -> TrainResult:
    config = run.config
    cores = plan_cores(config)
    async with contextlib.AsyncExitStack() as stack:
        held = stack.enter_context(_control_port(config))
        recorder = stack.enter_context(contextlib.closing(Recorder(run.root, on_progress)))
        scorer = stack.enter_context(contextlib.closing(_reward_pool(run, recorder)))
        controller = Controller(rules_of(config), _prompts(run), recorder.settled, config.streaming)
        fleet = Fleet(run, run.start_model, cores)
        examination = HeldOut(_held_out(run), config, fleet.engines, scorer, recorder.examined)
        unit = ControlUnit(
            controller, fleet, scorer, recorder, seed=config.seed, patience=_patience(config), examination=examination
        )
        await stack.enter_async_context(serve(control_app(unit, run.token), held))
        trainer = stack.enter_context(Trainer(run, _url(held), cores.trainer, recorder))
        await trainer.alive_while(stack.enter_async_context(fleet))
        try:
            await unit.run(lambda: trainer.check(unit.trainer_seen))
        except ForebayError as error:
            raise await _ended_early(error, unit, trainer) from None
        await trainer.finish()
        refuse_untaught(controller.ledger.fates())
        return _result(unit, recorder, scorer.tally, trainer.restarts, learning_of(config, recorder.steps))


async def _ended_early(error: ForebayError, unit: ControlUnit, trainer: "Trainer") -> ForebayError:
    """The error that ended the run, with the trainer's last checkpoint, once that is written."""
    # A trainer that has kept everyone waiting until the deadline would not write one either.
    hangs = isinstance(error, DeadlineError) and unit.controller.training_step is not None
    saved = await trainer.last_checkpoint() if unit.trainer_seen and not hangs else ""
    return type(error)(f"{error}; {saved}") if saved else error


def _patience(config: RunConfig) -> Patience:
    return Patience(
        stall_timeout_s=config.control.stall_timeout_s,
        step_timeout_s=config.training.step_timeout_s,
        max_restarts=config.generation.max_restarts,
        group_deadline_s=config.control.group_deadline_s,
        first_wave_s=config.control.first_wave_s,
    )


def _reward_pool(run: RunContext, recorder: Recorder) -> RewardPool:
    config = run.config
    batch = config.control.batch_groups * config.generation.group_size
    tally = Tally(batch, recorder.verdicts, recorder.event)
    return RewardPool(config.reward, run.start_model, config.generation.max_new_tokens, tally)


def _held_out(run: RunContext) -> list[Row]:
    """Validation prompts that some versions answer during training."""
    evaluation = run.config.evaluation
    return read_rows(run.data / "validation.parquet")[: evaluation.during_prompts] if evaluation.every_versions else []


def _control_port(config: RunConfig) -> socket.socket:
    """The Control Unit's port, held from now on: the engines' start takes long enough for others to want it."""
    host, port = config.launch.host, config.control.port
    if port:
        require_free(host, port, "control.port")
    return hold_port(host, port)


def _url(held: socket.socket) -> str:
    host, port = held.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _prompts(run: RunContext) -> Iterator[Minibatch]:
    rows = {row.prompt_id: row for row in read_rows(run.data / "train.parquet")}
    groups = read_schedule(run.schedule / FILE)

    def prompt(prompt_id: str, predicted: float) -> Prompt:
        row = rows[prompt_id]
        return Prompt(prompt_id, tuple(row.prompt_ids), row.prompt, row.answer, predicted, row.verifier, row.images)

    minibatches = [[tuple(prompt(*item) for item in minibatch) for minibatch in group] for group in groups]
    config = run.config
    step = sorted_steps(config.schedule, config.schedule_mode, config.control.batch_groups)
    return scheduled(minibatches, config.seed, step)


class Trainer:
    """The Training Unit's process: started, started again from its last checkpoint when it dies, ended."""

    def __init__(self, run: RunContext, url: str, cores: list[int] | None, recorder: Recorder) -> None:
        self._run, self._url, self._cores, self._recorder = run, url, cores, recorder
        self.restarts = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop(5.0)

    def check(self, seen: bool = True) -> None:
        """Start it again if it died. Raises `UserError` or `RunError` if it cannot go on, died too often, or (not
        `seen`) has not asked for its first batch in time."""
        code, limit = self._process.poll(), self._run.config.training.startup_timeout_s
        if code is None:
            if not seen and self._process.age_s > limit:
                raise DeadlineError(
                    f"the trainer has not asked for a batch {limit:g} s after its start (training.startup_timeout_s); "
                    f"its last words: {self._process.log_tail(1).strip() or 'none'}"
                )
            return
        reason = (
            f"the trainer {self._process.describe_exit()}: {self._process.log_tail(1).strip() or 'it said nothing'}"
        )
        if code == UserError.exit_code:
            raise UserError(reason)
        if self.restarts >= self._run.config.training.max_restarts:
            raise RunError(f"{reason}; no restart is left (training.max_restarts)")
        self.restarts += 1
        self._recorder.event("trainer_restarted", reason=reason)
        self._process.stop(0.0)
        self._start()

    async def alive_while(self, start: Awaitable[object]) -> None:
        """Wait for the engines' start, and look after the trainer meanwhile."""
        starting = asyncio.ensure_future(start)
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=WATCH_S)
                self.check()
            await starting
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)

    async def last_checkpoint(self) -> str:
        """The run has ended early: wait until the trainer, which is told so when it asks for groups, has written a
        checkpoint of what it has trained. Says what came of it, for the run's last message."""
        limit, record = self._run.config.training.step_timeout_s, self._run.root / "trainer_done.json"
        deadline = time.monotonic() + limit
        while not record.exists():
            if self._process.poll() is not None and not record.exists():
                return ""
            if time.monotonic() > deadline:
                return f"the trainer did not write a last checkpoint within {limit:g} s (training.step_timeout_s)"
            await asyncio.sleep(WATCH_S)
        step = json.loads(record.read_text())["steps"]
        return f"the trainer's checkpoint of step {step} is in {self._run.checkpoints}" if step else ""

    async def finish(self) -> None:
        """Wait for the trained model; the completion record decides, not the exit code."""
        limit, record = self._run.config.training.step_timeout_s, self._run.root / "trainer_done.json"
        deadline = time.monotonic() + limit
        while not record.exists():
            if self._process.poll() is not None and not record.exists():
                self.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"the trainer did not write the trained model within {limit:.0f} s")
            await asyncio.sleep(0.02)
        done = json.loads(record.read_text())
        if done["steps"] != self._run.config.training.steps:
            raise RunError(f"the trainer stopped after {done['steps']} steps: {done.get('reason', 'no reason given')}")

    def _start(self) -> None:
        argv, env, _ = trainer_command(self._run, self._url, self._cores)
        self._process = spawn("trainer", argv, env=env, log=self._run.logs / "trainer.log", cores=self._cores)


def refuse_untaught(fates: Mapping[str, int]) -> None:
    """A model that no group has taught anything is no result. Raises `RunError`."""
    if not fates["trained"]:
        raise RunError(
            f"training: none of {fates['filtered']} groups had rewards that differ, so the model is as it was; look at "
            "the verdicts in metrics.jsonl, the reward, how hard the prompts are, and generation.temperature"
        )


def _result(
    unit: ControlUnit, recorder: Recorder, tally: Tally, trainer_restarts: int, learning: dict[str, Any]
) -> TrainResult:
    controller = unit.controller
    steady = recorder.steps[WARM_UP_STEPS:] or recorder.steps
    first, last = recorder.steps[0], recorder.steps[-1]
    several = len(recorder.steps) > 1
    seconds = last["t"] - first["t"] if several else last["t"]
    tokens = recorder.tokens - (first["tokens_generated"] if several else 0)
    return TrainResult(
        steps=len(recorder.steps),
        wall_s=recorder.elapsed,
        step_times=[step["step_time_s"] for step in steady],
        train_waits=[step["train_wait_s"] for step in steady],
        staleness_bound=controller.rules.staleness_bound,
        staleness=Ages.of(recorder.staleness),
        sample_staleness=Ages.of(recorder.sample_staleness),
        token_staleness=Ages.of(recorder.token_staleness),
        fates=controller.ledger.fates(),
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        refreshes=len(recorder.pauses),
        refresh_pause_s=statistics.fmean(recorder.pauses) if recorder.pauses else 0.0,
        refresh_pause_max_s=max(recorder.pauses, default=0.0),
        tokens_recomputed=recorder.tokens_recomputed,
        tokens_discarded=controller.tokens_discarded,
        engine_restarts=unit.engine_restarts,
        trainer_restarts=trainer_restarts,
        learning=learning,
        verdicts=dict(tally.verdicts),
        examinations=recorder.examinations,
        reward_warnings=dict(tally.warnings),
    )
