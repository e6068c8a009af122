"""Which split of the devices, mode, policy and staleness bound to take: simulated with the code that would run.

Invariants:
- Every number comes from `simulate` or from the bound; what was not simulated is not in the table, and is counted.
- The cheap bound decides which splits are worth a simulation; on them the modes are compared as the profile has them,
  and on each mode's best split the policies and bounds. So a plan takes well under a minute, whatever the fleet.
- The same profile, devices and calibration give the same plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import ValidationError

from forebay.config import RunConfig
from forebay.config.run import Mode
from forebay.errors import RunError, UserError
from forebay.memory.engines import engine_devices
from forebay.scheduling.policies import Policy, resolve
from forebay.simulation.bound import Bound, bound
from forebay.simulation.calibrate import Calibration
from forebay.simulation.model import Scenario
from forebay.simulation.progress import Progress
from forebay.simulation.run import SimulationResult, simulate
from forebay.simulation.scenario import assumptions, first_wave, scenario_of

SPLITS = 4
"""Splits that are simulated: those with the lowest bounds."""
FAR = 1.5
"""A split whose bound is so many times the lowest one is not simulated."""
STEPS, FEWEST_STEPS = 40, 16
RESPONSES = 16_000
"""Responses in one simulation, unless that makes fewer than `FEWEST_STEPS` steps."""
BUDGET = 500_000
"""Responses in all simulations together: about half a minute on one slow core."""
SPARE = 1.25
"""Prompts drawn for each one that is trained."""
STALENESS = (1.0, 2.0, 4.0, 8.0)
"""Bounds that are tried in `fully_async` beside the profile's own."""
ALIKE, FRESH = 1.02, 0.1
"""Step times this close (a ratio) and mean staleness this close (in versions) are the same: simulations of other random
lengths differ by as much."""
DROPPED = 0.005
"""Share of dropped groups that is next to nothing."""


@dataclass(frozen=True)
class Choice:
    """One way to run the profile."""

    engines: int
    ranks: int
    mode: Mode
    policy: Policy
    max_staleness: float
    """In `fully_async`; 0 and 1 in the other modes."""
    usual: bool = field(default=False, compare=False)
    """Policy and bound are the profile's."""

    @property
    def split(self) -> str:
        return f"{self.engines} + {self.ranks}"


@dataclass(frozen=True)
class Line:
    """A choice and what its simulation said."""

    choice: Choice
    result: SimulationResult

    @property
    def dropped(self) -> float:
        """Share of the finished groups that were too old to train: those of the longest responses, mostly."""
        stale, trained = (self.result.fates.get(fate, 0) for fate in ("stale", "trained"))
        return stale / (stale + trained) if stale else 0.0


@dataclass(frozen=True)
class Plan:
    """What was compared."""

    name: str
    devices: int
    engine_devices: int
    lines: list[Line]
    """By step time."""
    bounds: dict[str, Bound]
    """Of every split, "engines + ranks"."""
    steps: int
    """Of each simulation, or more where several batches are on their way at a time."""
    skipped: int
    """Choices that were not simulated, to keep it short or since they cannot go on."""
    assumptions: list[str]

    @property
    def alike(self) -> list[Line]:
        """The choices that are as fast as the fastest."""
        return [line for line in self.lines if line.result.step_time_s <= ALIKE * self.lines[0].result.step_time_s]

    @property
    def best(self) -> Line:
        """Of those, one that drops next to nothing; of those, one of the least stale; and of those, the one that the
        profile has already."""
        whole = [line for line in self.alike if line.dropped <= DROPPED] or self.alike
        least = min(line.result.staleness.mean for line in whole)
        fresh = [line for line in whole if line.result.staleness.mean <= least + FRESH]
        return min(fresh, key=lambda line: (not line.choice.usual, line.result.step_time_s))


def make_plan(
    config: RunConfig, devices: int, calibration: Calibration | None = None, progress: Progress | None = None
) -> Plan:
    """Compare the ways to run a profile on so many devices; `progress` is told how far it is. Raises `UserError`."""
    splits = list(_splits(config, devices))
    steps = max(FEWEST_STEPS, min(STEPS, RESPONSES // (config.control.batch_groups * config.generation.group_size)))
    planner = _Planner(config, calibration, steps, progress or Progress(""))
    bounds = {split: planner.bound(*split) for split in splits}
    kept = sorted(splits, key=lambda split: bounds[split].step_time_s)
    lowest = bounds[kept[0]].step_time_s
    kept = [split for split in kept[:SPLITS] if bounds[split].step_time_s <= FAR * lowest]
    lines = planner.compare(kept)
    return Plan(
        name=config.name,
        devices=devices,
        engine_devices=engine_devices(config),
        lines=sorted(lines, key=lambda line: line.result.step_time_s),
        bounds={f"{engines} + {ranks}": value for (engines, ranks), value in bounds.items()},
        steps=steps,
        skipped=planner.skipped,
        assumptions=[*assumptions(config, calibration, steps), *_taken_for_granted(config, calibration)],
    )


def _splits(config: RunConfig, devices: int) -> Iterator[tuple[int, int]]:
    """(engines, trainer's ranks): every device is used, both sides have one at least."""
    each = engine_devices(config)
    if devices < each + 1:
        raise UserError(
            f"--devices {devices}: a run needs {each + 1} at least, {each} for an engine and one for the trainer"
        )
    for engines in range(1, (devices - 1) // each + 1):
        yield engines, devices - engines * each


class _Planner:
    """Simulates choices while its budget lasts."""

    def __init__(self, config: RunConfig, calibration: Calibration | None, steps: int, progress: Progress) -> None:
        self._config, self._calibration, self._steps, self._progress = config, calibration, steps, progress
        self._left = BUDGET
        self._lines: dict[Choice, Line] = {}
        self._scenarios: dict[Choice, Scenario] = {}
        self.skipped = 0
        self._stuck = ""

    def bound(self, engines: int, ranks: int) -> Bound:
        """Of a split, in the profile's own mode."""
        return bound(self._scenario(self._choice(engines, ranks, self._config.mode)))

    def compare(self, splits: Sequence[tuple[int, int]]) -> list[Line]:
        """The modes on every split, then what varies on each mode's best one."""
        for split in splits:
            for mode in get_args(Mode):
                self._try(self._choice(*split, mode))
        for choice in [self._best(mode) for mode in get_args(Mode)]:
            for variant in self._variants(choice) if choice else ():
                self._try(variant)
        if not self._lines:
            why = f": {self._stuck}" if self._stuck else ""
            raise UserError(f"plan: none of the modes can be simulated with this profile's control settings{why}")
        return list(self._lines.values())

    def _choice(self, engines: int, ranks: int, mode: Mode) -> Choice:
        """As the profile has it, in this mode."""
        staleness = {"sync": 0.0, "one_step_off": 1.0}.get(mode, float(self._config.control.max_staleness))
        return Choice(engines, ranks, mode, resolve(self._config.schedule.policy, mode), staleness, usual=True)

    def _variants(self, choice: Choice) -> Iterator[Choice]:
        for policy in get_args(Policy):
            yield replace(choice, policy=policy, usual=False)
        if choice.mode == "fully_async":
            for limit in STALENESS:
                yield replace(choice, max_staleness=limit, usual=False)

    def _best(self, mode: Mode) -> Choice | None:
        own = [line for line in self._lines.values() if line.choice.mode == mode]
        return min(own, key=lambda line: line.result.step_time_s).choice if own else None

    def _try(self, choice: Choice) -> None:
        """Simulate it, unless that was done, cannot be done, or would take too long."""
        if choice in self._lines:
            return
        try:
            scenario = self._scenario(choice)
        except ValidationError:  # the profile's other settings forbid it
            self.skipped += 1
            return
        cost = scenario.rules.steps * scenario.rules.batch_groups * scenario.rules.group_size
        if self._lines and cost > self._left:
            self.skipped += 1
            return
        self._left -= cost
        self._progress.begin(
            f"simulating choice {len(self._lines) + 1} ({choice.split}, {choice.mode}, {choice.policy})",
            scenario.rules.steps,
        )
        try:
            self._lines[choice] = Line(choice, simulate(scenario, progress=self._progress))
        except (RunError, UserError) as error:  # no rule lets it go on, or no group keeps its deadline
            self.skipped += 1
            self._stuck = str(error)

    def _scenario(self, choice: Choice) -> Scenario:
        """Work and rules do not depend on the split: they are made once."""
        shared = replace(choice, engines=1, ranks=1)
        if shared not in self._scenarios:
            self._progress.begin("drawing lengths and ordering the prompts")
            self._scenarios[shared] = self._make(shared)
        made = self._scenarios[shared]
        per_token_s = made.trainer.per_token_s * _measured_ranks(self._config, self._calibration) / choice.ranks
        wave = first_wave(made.rules, made.streaming, choice.engines)
        return replace(
            made,
            rules=replace(made.rules, steps=max(self._steps, 3 * wave)),
            engines=choice.engines,
            trainer=replace(made.trainer, per_token_s=per_token_s),
            warm_up=max(self._steps // 4, wave),
        )

    def _make(self, choice: Choice) -> Scenario:
        config = _changed(
            self._config,
            mode=choice.mode,
            training={"steps": self._steps},
            schedule={"policy": choice.policy},
            control={"max_staleness": choice.max_staleness} if choice.mode == "fully_async" else {},
        )
        prompts = math.ceil(SPARE * self._steps * config.control.batch_groups)
        return scenario_of(config, self._calibration, prompts=prompts)


def _measured_ranks(config: RunConfig, calibration: Calibration | None) -> int:
    """Ranks of the trainer whose time per token is known: the profile's, or one that is assumed."""
    return config.training.ranks if calibration else 1


def _taken_for_granted(config: RunConfig, calibration: Calibration | None) -> list[str]:
    ranks = _measured_ranks(config, calibration)
    return [
        "the trainer's time per token falls in proportion to its ranks "
        f"({'measured' if calibration else 'assumed'} with {ranks}); its fixed time does not",
        "engines do not slow each other down, however many there are",
    ]


def _changed(config: RunConfig, **changes: Any) -> RunConfig:
    """A profile with other settings, checked as a whole; sections are merged."""
    values = config.model_dump()
    for name, change in changes.items():
        values[name] = values[name] | change if isinstance(change, dict) else change
    return RunConfig.model_validate(values)
