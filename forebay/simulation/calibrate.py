"""From a finished run's records to the numbers of a simulation: what decoding, training, refreshes and rewards cost,
and how long the responses were.

Invariants:
- Only what the run measured goes in: `metrics.jsonl` and `ledger.parquet`. A run that lacks it is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from forebay.control.types import EngineLoad, Fate
from forebay.errors import UserError
from forebay.simulation.fit import EngineCosts, engine_costs, lives_of, not_negative
from forebay.simulation.kv import token_bytes
from forebay.simulation.model import TrainerModel, Workload
from forebay.telemetry.ledger import read_ledger
from forebay.telemetry.metrics import Metrics, Record, read_metrics

LEAST_STEPS = 12
"""Fewer steps say too little."""
LEAST_OBSERVATIONS = 8
WARM_UP, EDGE = 10, 3
"""Steps at the begin (a third of them, if that is less) and at the end that are not steady: filling, emptying."""

OWN = ("run", "engines", "refresh_s", "reward_s", "teaching", "kv_token_bytes")
"""Fields of a calibration that are plain numbers and names."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """The run's own steady steps."""

    steps: int
    step_time_s: float
    """From one step's end to the next one's."""
    train_wait_ratio: float
    tokens_per_s: float
    """Of finished groups, all engines."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What one run tells a simulation."""

    run: str
    """Name of its folder."""
    engines: int
    engine: EngineCosts
    trainer: TrainerModel
    refresh_s: float
    """Of one engine, from the begin of its refresh to the pause."""
    reward_s: float
    teaching: float
    """Share of the groups whose rewards differed."""
    workload: Workload
    """The groups of the run in order of admission; each prompt as long as the mean one."""
    kv_token_bytes: float | None
    """Of one engine's KV cache; None: not known."""
    measured: Measured

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        workload = {name: getattr(self.workload, name).tolist() for name in ("lengths", "predicted", "prompt_tokens")}
        plain = {name: asdict(getattr(self, name)) for name in ("engine", "trainer", "measured")}
        own = {name: getattr(self, name) for name in OWN}
        return own | plain | {"workload": workload}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Calibration":
        """What `to_json` gave; raises `UserError` for anything else."""
        try:
            workload = Workload(
                np.asarray(values["workload"]["lengths"], dtype=np.int32),
                np.asarray(values["workload"]["predicted"], dtype=np.float64),
                np.asarray(values["workload"]["prompt_tokens"], dtype=np.int32),
            )
            return cls(
                engine=EngineCosts(**values["engine"]),
                trainer=TrainerModel(**values["trainer"]),
                measured=Measured(**values["measured"]),
                workload=workload,
                **{name: values[name] for name in OWN},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"this is not a calibration ({type(error).__name__}: {error}): make it anew") from None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Raises `UserError` if the file is not one."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a calibration ({error})") from None
        return cls.from_json(values)


def calibrate(folder: Path) -> Calibration:
    """From the records in a run's folder. Raises `UserError` if they are too few, or of a version that did not observe
    its engines."""
    settings = _Settings.of(folder)
    metrics, ledger = read_metrics(folder / "metrics.jsonl"), read_ledger(folder / "ledger.parquet")
    if len(metrics.steps) < LEAST_STEPS:
        raise UserError(
            f"{folder}: has {len(metrics.steps)} steps, too few to calibrate from: a run of {LEAST_STEPS} or more is "
            "needed"
        )
    observed = [record for record in metrics.queue if all(name in record for name in EngineLoad._fields)]
    if len(observed) < LEAST_OBSERVATIONS or not all("seconds" in record for record in metrics.refreshes):
        raise UserError(
            f"{folder}: metrics.jsonl has {len(observed)} observations of the engines, {LEAST_OBSERVATIONS} are needed "
            "to calibrate: the run ended too soon, or an older version of Forebay made it; run the profile again"
        )
    groups = _finished_groups(ledger, folder)
    prompt_tokens = _mean_prompt(observed, ledger)
    refreshes, engines = metrics.refreshes, len(observed[0]["active"])
    lives = [lives_of(ledger, engine, prompt_tokens) for engine in range(engines)]
    costs = engine_costs(lives, observed, refreshes, settings.slots)
    if costs is None:
        raise UserError(f"{folder}: too few groups were finished to calibrate from: let the run go on for longer")
    return Calibration(
        run=folder.resolve().name,
        engines=engines,
        engine=costs,
        trainer=fit_trainer(metrics, groups, prompt_tokens),
        refresh_s=_mean([record["seconds"] - record["pause_s"] for record in refreshes]),
        reward_s=_mean(_seconds(groups, "finished_t", "scored_t")),
        teaching=_teaching(metrics.steps),
        workload=Workload(
            np.array(groups["lengths"].to_pylist(), dtype=np.int32),
            np.maximum(groups["predicted_length"].to_numpy(), 1e-3),
            np.full(groups.num_rows, round(prompt_tokens), dtype=np.int32),
        ),
        kv_token_bytes=token_bytes(folder / "start_model", settings.dtype),
        measured=_measured(metrics.steps),
    )


@dataclass(frozen=True)
class _Settings:
    """What is asked of the settings of a run, which may be those of an older version."""

    slots: int
    dtype: str

    @classmethod
    def of(cls, folder: Path) -> "_Settings":
        for name, outer in (("config.yaml", None), ("trainer.json", "config")):
            try:
                read = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
                settings = read[outer] if outer else read
                return cls(int(settings["generation"]["max_num_seqs"]), str(settings["model"]["dtype"]))
            except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
                continue
        raise UserError(f"{folder}: has no config.yaml with the settings of a run: not a run's folder")


# ---- trainer


def fit_trainer(metrics: Metrics, groups: pa.Table, prompt_tokens: float) -> TrainerModel:
    """A step's seconds by its tokens. What a step takes beyond its own account (reports, checkpoints) is fixed cost."""
    steps = metrics.steps[1:]  # the first one warms up
    tokens = _trained_tokens(metrics.steps, groups, prompt_tokens)[1:]
    seconds = np.array([step["train_s"] for step in steps])
    fixed, per_token = not_negative(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    between = metrics.steps[-1]["t"] - metrics.steps[0]["t"] - sum(step["step_time_s"] for step in steps)
    published = [step["publish_s"] for step in steps if step["publish_s"] > 0]
    return TrainerModel(fixed + max(between / len(steps), 0.0), per_token, publish_s=_mean(published))


def _trained_tokens(steps: Sequence[Record], groups: pa.Table, prompt_tokens: float) -> Array:
    """Prompt and response tokens that each step trained."""
    ends = np.array([step["t"] for step in steps])
    trained = groups.filter(pc.equal(groups["fate"], Fate.TRAINED.value))
    size = len(groups["lengths"][0])
    # A step's groups get their fate just before its record is written, whose time is rounded.
    step = np.searchsorted(ends + 1e-4, trained["settled_t"].to_numpy())
    tokens = np.zeros(len(steps) + 1)
    np.add.at(tokens, step, trained["tokens"].to_numpy() + size * prompt_tokens)
    return tokens[: len(steps)]


# ---- the rest


def _finished_groups(ledger: pa.Table, folder: Path) -> pa.Table:
    """Groups all of whose responses came to their end, in order of admission."""
    finished = ledger.filter(pc.is_valid(ledger["scored_t"]))
    if not finished.num_rows:
        raise UserError(f"{folder}: no group of this run was finished: there is nothing to calibrate from")
    return finished


def _mean_prompt(observed: Sequence[Record], ledger: pa.Table) -> float:
    """Prompt tokens of a group: of those sent by the middle of the run, which all have their fate by its end."""
    middle = observed[len(observed) // 2]
    begun = ledger.filter(pc.less_equal(ledger["admitted_t"], middle["t"]))
    attempts = pc.sum(begun["attempts"]).as_py()
    return float(sum(middle["prompts"]) / attempts) if attempts else 0.0


def _teaching(steps: Sequence[Record]) -> float:
    trained = sum(step["trained_groups"] for step in steps)
    return float(max(trained, 1) / max(sum(step["filtered_groups"] for step in steps) + trained, 1))


def _measured(steps: Sequence[Record]) -> Measured:
    steady = steps[min(WARM_UP, len(steps) // 3) - 1 : -EDGE]
    first, last = steady[0], steady[-1]
    seconds, count = last["t"] - first["t"], len(steady) - 1
    return Measured(
        steps=count,
        step_time_s=seconds / count,
        train_wait_ratio=sum(step["train_wait_s"] for step in steady[1:]) / seconds,
        tokens_per_s=(last["tokens_generated"] - first["tokens_generated"]) / seconds,
    )


def _seconds(table: pa.Table, begin: str, end: str) -> list[float]:
    values: list[float | None] = pc.subtract(table[end], table[begin]).to_pylist()
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
