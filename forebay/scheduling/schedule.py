"""The schedule of a run: every training prompt exactly once, in batch groups of minibatches.

Artifact, in the run's folder `schedule/`: `schedule.parquet`, one row a prompt in order (batch_group, minibatch,
prompt_id, predicted), and `manifest.json`, written last: what the schedule was made from and how, its figures, and the
SHA-256 of the file.

Invariants:
- A schedule is read only if its file is the one that its manifest names.
- It is made once for the same predictions and settings, and used again after that.
- Everything goes by columns, so that a million prompts take seconds.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.run import RunContext
from forebay.scheduling.minibatches import utilisation
from forebay.scheduling.policies import Order, load, make_order, resolve
from forebay.scheduling.predictions import Predictions, digest, read_columns, read_predictions
from forebay.scheduling.quality import predicted_variation

FILE = "schedule.parquet"
PREDICTIONS = "predictions.parquet"
MANIFEST = "manifest.json"
FORMAT = 1
COLUMNS = ("batch_group", "minibatch", "prompt_id", "predicted")


@dataclass(frozen=True)
class ScheduleResult:
    """What was made and how good it is, by predicted lengths."""

    policy: str
    """The one that `auto` meant."""
    prompts: int
    minibatches: int
    batch_groups: int
    utilisation: float
    """Mean share of real tokens in the minibatches, if they were padded; 0..1."""
    load_variation: float
    """Coefficient of variation of the batch groups' predicted load."""
    random_variation: float
    """The same of the prompts in random order."""
    sorted_variation: float
    """And sorted by load."""


def make_schedule(run: RunContext) -> ScheduleResult:
    """Read the predictions, write the schedule; or find the one that was made from the same. Raises `UserError`."""
    config = run.config
    predictions = read_predictions(run.lengths / PREDICTIONS, config.schedule.load == "kv_area")
    count, batch = len(predictions.predicted), config.control.batch_groups
    if count < batch:
        raise UserError(
            f"control.batch_groups ({batch}) is more than the {count} prompts of the training split: a batch would "
            "hold the same prompt twice; lower it, or give more data (data.train_prompts)"
        )
    basis = _basis(config, predictions)
    known = _read_manifest(run.schedule)
    if known is not None and all(known.get(name) == value for name, value in basis.items()):
        _check_digest(run.schedule, known)
        return ScheduleResult(**known["figures"])
    order = make_order(
        predictions.predicted,
        predictions.prompt_tokens,
        config.schedule,
        config.schedule_mode,
        config.control.batch_groups,
        config.seed,
    )
    result = _result(config, predictions, order)
    write_schedule(run.schedule, predictions.prompt_ids, predictions.predicted, order, basis, asdict(result))
    return result


def write_schedule(
    folder: Path,
    prompt_ids: pa.StringArray,
    predicted: NDArray[np.float64],
    order: Order,
    basis: dict[str, Any],
    figures: dict[str, Any],
) -> None:
    """Write the artifact, the file first; the folder is made, an older schedule in it goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    groups, count = order.batch_groups, order.minibatches.size
    group = np.repeat(np.arange(groups.size), groups)
    within = np.arange(count) - np.repeat(np.cumsum(groups) - groups, groups)
    columns = {
        "batch_group": np.repeat(group, order.minibatches),
        "minibatch": np.repeat(within, order.minibatches),
        "prompt_id": prompt_ids.take(pa.array(order.prompts)),
        "predicted": predicted[order.prompts],
    }
    pq.write_table(pa.table(columns), folder / FILE)  # type: ignore[no-untyped-call]
    manifest = {"format": FORMAT, **basis, "figures": figures, "sha256": {FILE: digest(folder / FILE)}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def read_schedule(path: Path) -> list[list[list[tuple[str, float]]]]:
    """Batch groups of minibatches of (prompt id, predicted length). Raises `UserError` for a file that is not the one
    its manifest names."""
    manifest = _read_manifest(path.parent)
    if manifest is None:
        raise UserError(f"{path}: has no {MANIFEST} beside it, so it is not complete: make the schedule again")
    _check_digest(path.parent, manifest)
    table = read_columns(path, COLUMNS)
    rows = list(zip(table["prompt_id"].to_pylist(), table["predicted"].to_pylist(), strict=True))
    group, minibatch = (table[name].to_numpy() for name in COLUMNS[:2])
    changes = np.flatnonzero((np.diff(group) != 0) | (np.diff(minibatch) != 0)) + 1
    starts = [0, *changes.tolist()] if rows else []
    groups: list[list[list[tuple[str, float]]]] = []
    for start, end, first in zip(starts, [*starts[1:], len(rows)], minibatch[starts].tolist(), strict=True):
        if first == 0:
            groups.append([])
        groups[-1].append(rows[start:end])
    return groups


def lines(result: ScheduleResult) -> list[tuple[str, str]]:
    """(name, text) of what people want to know of a schedule."""
    return [
        ("policy", result.policy),
        ("prompts", f"{result.prompts:,}"),
        ("minibatches", f"{result.minibatches:,}"),
        ("batch groups", f"{result.batch_groups:,}"),
        ("utilisation", f"{result.utilisation:.3f} of the tokens are real, if minibatches were padded"),
        (
            "load variation",
            f"{result.load_variation:.4f} over batch groups (random order {result.random_variation:.4f}, "
            f"sorted {result.sorted_variation:.4f})",
        ),
    ]


def _basis(config: RunConfig, predictions: Predictions) -> dict[str, Any]:
    """All that decides what a schedule looks like."""
    return {
        "policy": resolve(config.schedule.policy, config.schedule_mode),
        "settings": config.schedule.model_dump(mode="json") | {"batch_groups": config.control.batch_groups},
        "seed": config.seed,
        "prompts": len(predictions.predicted),
        "made_from": {PREDICTIONS: predictions.sha256},
    }


def _result(config: RunConfig, predictions: Predictions, order: Order) -> ScheduleResult:
    loads = load(predictions.predicted, predictions.prompt_tokens, config.schedule)
    variation = predicted_variation(loads, order, config.seed)
    return ScheduleResult(
        policy=resolve(config.schedule.policy, config.schedule_mode),
        prompts=order.prompts.size,
        minibatches=order.minibatches.size,
        batch_groups=order.batch_groups.size,
        utilisation=utilisation(predictions.predicted[order.prompts], order.minibatches),
        load_variation=variation.scheduled,
        random_variation=variation.random,
        sorted_variation=variation.sorted,
    )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """None if there is none, or one of another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{folder / MANIFEST}: is not JSON: remove {folder} to have it made again") from None
    known: bool = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    return manifest if known else None


def _check_digest(folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / FILE
    if not path.is_file() or digest(path) != manifest.get("sha256", {}).get(FILE):
        raise UserError(f"{path}: is not the file that {MANIFEST} names: remove {folder} to have it made again")
