"""Stages that take no time, in place of the library's: to test the flow, its deployments and its ending.

What is not a stub: the flow, the tasks, the artifacts, the summary, Prefect. `STUB_TRAIN` in the environment makes the
stub of `train` fail (`fail`) or start a process and wait (`wait`).
"""

import asyncio
import json
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.control.recorder import Ages


@dataclass(frozen=True)
class Lengths:
    predictor: str = "features"
    spearman: float = 0.5
    kendall: float = 0.4
    ceiling: float = 0.8
    share: float = 0.625
    mae: float = 3.0
    coverage: float = 0.9
    profiled: int = 8


@dataclass(frozen=True)
class Schedule:
    minibatches: int = 3
    policy: str = "balanced"
    load_variation: float = 0.05
    random_variation: float = 0.2
    sorted_variation: float = 0.7


@dataclass(frozen=True)
class Trained:
    steps: int
    step_times: list[float]
    train_waits: list[float]
    staleness_bound: int = 4
    staleness: Ages = field(default_factory=lambda: Ages(1.5, 3, 3, {0: 4, 2: 2, 3: 1}))
    sample_staleness: Ages = field(default_factory=lambda: Ages(1.4, 3, 3, {0: 40, 3: 10}))
    token_staleness: Ages = field(default_factory=lambda: Ages(1.25, 2, 3, {0: 400, 3: 100}))
    refreshes: int = 2
    refresh_pause_s: float = 0.02
    refresh_pause_max_s: float = 0.03
    tokens_recomputed: int = 640
    tokens_discarded: int = 12
    engine_restarts: int = 1
    trainer_restarts: int = 0
    learning: dict[str, Any] = field(default_factory=lambda: {"correction": "behaviour"})
    fates: dict[str, int] = field(
        default_factory=lambda: {"admitted": 10, "trained": 7, "filtered": 2, "stale": 1, "failed": 0}
    )
    verdicts: dict[str, int] = field(default_factory=lambda: {"right": 30, "wrong": 41, "timed_out": 1})
    reward_warnings: dict[str, int] = field(default_factory=lambda: {"AllScoresEqual": 2})
    tokens_per_s: float = 900.0
    examinations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluated:
    n: int = 64
    before: float = 0.25
    after: float = 0.5
    p_value: float = 0.001
    interval: tuple[float, float] = (0.1, 0.4)
    test_sha256: str = "0" * 64
    examples: list[dict[str, Any]] = field(default_factory=list)


def prepare_data(run: Any) -> dict[str, int]:
    run.data.mkdir()
    return {"train": 8}


def predict_lengths(run: Any) -> Lengths:
    return Lengths()


def make_schedule(run: Any) -> Schedule:
    return Schedule()


def train(run: Any, on_progress: Any) -> Trained:
    from forebay.errors import RunError

    steps = run.config.training.steps
    for step in range(1, steps + 1):
        on_progress(
            {"step": step, "reward_mean": step / steps, "step_time_s": 2.0, "train_wait_s": 0.5, "staleness_mean": 1.5}
        )
    match os.environ.get("STUB_TRAIN"):
        case "fail":
            raise RunError(f"engine 0 died\nwith token {run.token}")
        case "wait":
            _wait_on_a_process(run)
    return Trained(steps, [float(step) for step in range(1, steps + 1)], [0.5] * steps)


def _wait_on_a_process(run: Any) -> None:
    from forebay.launch.processes import spawn

    child = spawn("child", ["sleep", "600"], env={}, log=run.logs / "child.log")
    try:
        (run.root / "child.pid").write_text(str(child.pid))
        asyncio.run(asyncio.sleep(600))
    finally:
        child.stop(grace_s=2.0)


def evaluate(run: Any) -> Evaluated:
    return Evaluated()


def write_report(run: Any, summary: dict[str, Any]) -> Path:
    path: Path = run.root / "report.png"
    path.write_bytes(b"report")
    return path


def publish(run: Any, summary: dict[str, Any]) -> str:
    folder = Path(run.config.storage.uri.removeprefix("file://")).resolve() / run.run_id
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    return f"file://{folder}"


def report_markdown(summary: dict[str, Any], evaluation: Any) -> str:
    return f"# {summary['run_id']}"


STAGES: dict[str, Any] = {
    "forebay.data.prepare": prepare_data,
    "forebay.lengths.stage": predict_lengths,
    "forebay.scheduling.schedule": make_schedule,
    "forebay.train": train,
    "forebay.evaluation.stage": evaluate,
    "forebay.telemetry.report": (write_report, report_markdown),
    "forebay.storage.publish": publish,
}


def install() -> None:
    """Put stub modules where the tasks will import the library's."""
    for name, functions in STAGES.items():
        module = types.ModuleType(name)
        for function in functions if isinstance(functions, tuple) else (functions,):
            setattr(module, function.__name__, function)
        sys.modules[name] = module
