"""`publish`: what lasts of a run goes to the store, as one tree named by the run's id.

Invariants:
- The run's tree holds no secret and no log: the profile has none (credentials and the run's token live elsewhere).
- `latest.json` names a completed run whose manifest is already written; a failed run never moves it.
"""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from forebay.errors import RunError
from forebay.run import RunContext
from forebay.storage.store import Store, tree_files

LATEST = "latest.json"
COMPLETED = "completed"
_SINGLE_FILES = (
    "ledger.parquet",
    "metrics.jsonl",
    "evaluation.json",
    "evaluation_samples.parquet",
    "report.png",
    "report.md",
    "config.yaml",
    "summary.json",
)
_FOLDER_FILES = ("*.parquet", "*.json", "*.png")
"""Of the folders data, lengths and schedule."""


def publish(run: RunContext, summary: dict[str, Any]) -> str:
    """Publish the run's results, trained model included if it completed; returns the URI of the published run.

    Writes `config.yaml` and `summary.json` in the run's folder on the way. Safe to repeat with the same summary.
    Raises `UserError` and `RunError`, one line each.
    """
    store = Store(run.config.storage.uri, run.config.storage.endpoint_url)
    completed = summary.get("status") == COMPLETED
    if completed and not run.trained_model.is_dir():
        raise RunError(f"run {run.run_id} is said to have completed, but there is no model in {run.trained_model}")
    summary = finite(summary)
    _write_documents(run, summary)
    extra = {"run_id": run.run_id, "status": summary.get("status"), "mode": run.config.mode}
    store.publish_files(_collect(run, with_model=completed), run.run_id, extra)
    if completed:
        store.put_json(LATEST, {"run_id": run.run_id, "summary": summary})
    return f"{store.uri}/{run.run_id}"


def finite(value: Any) -> Any:
    """The same JSON value with null for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_documents(run: RunContext, summary: dict[str, Any]) -> None:
    settings = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False)
    try:
        (run.root / "config.yaml").write_text(settings, encoding="utf-8")
        (run.root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{error.filename or run.root}: {error.strerror}") from None


def _collect(run: RunContext, *, with_model: bool) -> dict[str, Path]:
    """Published name -> local file, of everything that the run has got as far as writing."""
    files = {name: run.root / name for name in _SINGLE_FILES if (run.root / name).is_file()}
    for folder in (run.data, run.lengths, run.schedule):
        if folder.is_dir():
            found = [path for pattern in _FOLDER_FILES for path in sorted(folder.glob(pattern))]
            files |= {f"{folder.name}/{path.name}": path for path in found}
    if with_model:
        files |= {f"{run.trained_model.name}/{name}": path for name, path in tree_files(run.trained_model).items()}
    return files
