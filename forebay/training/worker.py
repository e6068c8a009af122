"""One rank of the Training Unit: `python -m forebay.training.worker --job trainer.json`, also under torchrun.

Invariants:
- Rank 0 alone speaks to the Control Unit; the others do what it says, in the same order.
- A step is reported before the snapshot it leads to.
- `trainer_done.json` = {"steps": n, "reason": null | why it stopped early} is written last. All steps done and the
  trained model complete: n equals training.steps and the reason is null. Judge by it, not by the exit code.
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from forebay.config import parse_config
from forebay.control.types import Snapshot
from forebay.errors import ForebayError, RunError
from forebay.run import RunContext
from forebay.training.batches import decode_batch
from forebay.training.client import ControlClient, RunOver
from forebay.training.distributed import Message, Ranks
from forebay.training.engine import TrainEngine
from forebay.training.snapshots import SnapshotWriter, prune, snapshot_folder

TOKEN = "FOREBAY_TOKEN"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 1 (2 for the user's mistake) after one line on stderr."""
    parser = argparse.ArgumentParser(prog="forebay.training.worker")
    parser.add_argument("--job", type=Path, required=True)
    rank = os.environ.get("RANK", "0")
    try:
        run, control_url = read_job(parser.parse_args(arguments).job)
        ranks = Ranks.join(run.config.training.step_timeout_s)
        engine = TrainEngine(run, ranks)
        if ranks.rank == 0:
            _Leader(run, control_url, ranks, engine).train()
        else:
            _follow(run, ranks, engine)
        ranks.leave()
    except ForebayError as error:
        where = "trainer" if rank == "0" else f"trainer: rank {rank}"
        print(f"{where}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except RuntimeError as error:  # torch's: out of memory, a collective's time-out, or a bug
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"trainer: rank {rank}: {first}", file=sys.stderr, flush=True)
        return 1


def read_job(path: Path) -> tuple[RunContext, str]:
    """(run, URL of the Control Unit) from the file that `launch.trainer_command` wrote; the token is in the
    environment."""
    token = os.environ.get(TOKEN)
    if not token:
        raise RunError(f"{TOKEN} is not set: the trainer is started by `forebay`, not by hand")
    try:
        job = json.loads(path.read_text(encoding="utf-8"))
        config = parse_config(job["config"], where=str(path))
        return RunContext(config, job["run_id"], Path(job["scratch"]), token), job["control_url"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} is not a trainer's job ({type(error).__name__}: {error})") from None


def _follow(run: RunContext, ranks: Ranks, engine: TrainEngine) -> None:
    while True:
        kind, body = ranks.receive()
        if kind is Message.STOP:
            if json.loads(body)["export"]:
                _drain(engine)
            return
        batch = decode_batch(body, run.config.training.advantage)
        engine.step(batch)
        if batch.step % run.config.control.sync_every == 0:
            _drain(engine)


def _drain(engine: TrainEngine) -> None:
    for _ in engine.shards():
        pass


class _Leader:
    """Rank 0."""

    def __init__(self, run: RunContext, control_url: str, ranks: Ranks, engine: TrainEngine) -> None:
        self._run, self._ranks, self._engine = run, ranks, engine
        self._client = ControlClient(control_url, run.token, run.config.training.step_timeout_s)
        self._writer = SnapshotWriter(run.start_model, run.config.model.dtype)
        self._done = 0
        run.snapshots.mkdir(parents=True, exist_ok=True)

    def train(self) -> None:
        """All steps, the trained model, the record of completion."""
        steps, reason = self._run.config.training.steps, None
        try:
            for step in range(1, steps + 1):
                self._step(step)
        except RunOver as over:
            # After the last step the run is over in any case, and its last snapshot may come too late for anyone.
            reason = str(over) if self._done < steps else None
        self._ranks.send(Message.STOP, json.dumps({"export": reason is None}).encode())
        if reason is None:
            sync_every = self._run.config.control.sync_every
            version = -(-steps // sync_every)
            self._writer.write(self._run.trained_model, version, self._engine.shards(), fsync=True)
        _record(self._run.root / "trainer_done.json", {"steps": self._done, "reason": reason})

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        body = self._await_batch(step)
        received = time.perf_counter()
        batch = decode_batch(body, self._run.config.training.advantage)
        if batch.step != step:
            raise RunError(f"the Control Unit sent the batch of step {batch.step}, not of step {step}")
        self._ranks.send(Message.BATCH, body)
        metrics = self._engine.step(batch)
        trained = time.perf_counter()
        snapshot = self._snapshot(step) if step % self._run.config.control.sync_every == 0 else None
        published = time.perf_counter()
        self._client.report_step(
            step,
            train_wait_s=received - began,
            train_s=trained - received,
            publish_s=published - trained,
            metrics=metrics,
        )
        self._done = step
        if snapshot:
            self._client.report_snapshot(snapshot)

    def _await_batch(self, step: int) -> bytes:
        while True:
            body = self._client.next_batch(step)
            if body is not None:
                return body
            self._ranks.send(Message.WAIT)

    def _snapshot(self, step: int) -> Snapshot:
        version = step // self._run.config.control.sync_every
        folder = snapshot_folder(self._run.snapshots, version)
        snapshot = self._writer.write(folder, version, self._engine.shards(), fsync=False)
        prune(self._run.snapshots)
        return snapshot


def _record(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # as in Ranks.leave: no interpreter shutdown under live gloo threads
