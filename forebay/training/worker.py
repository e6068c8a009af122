"""One rank of the Training Unit: `python -m forebay.training.worker --job trainer.json`, also under torchrun.

Invariants:
- Rank 0 alone speaks to the Control Unit; the others do what it says, in the same order.
- A step is reported before the snapshot it leads to, and before its checkpoint is begun. Both are written while
  training goes on; a checkpoint is complete only when all snapshots of its step and before are.
- A trainer that starts goes on after the newest checkpoint. What it trains again it publishes under the same number,
  and a version that is on the disk stays as it is: the Control Unit serves the same groups again.
- `trainer_done.json` = {"steps": n, "reason": null | why it stopped early} is written last. All steps done and the
  trained model complete: n equals training.steps and the reason is null. Judge by it, not by the exit code.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from forebay.config import parse_config
from forebay.control.types import Snapshot
from forebay.errors import ForebayError, RunError
from forebay.run import RunContext
from forebay.training.batches import Chunk, decode_chunk
from forebay.training.checkpoints import Checkpoints
from forebay.training.client import ControlClient, RunOver
from forebay.training.distributed import Message, Ranks
from forebay.training.engine import TrainEngine
from forebay.training.publisher import Publisher
from forebay.training.snapshots import (
    AdapterWriter,
    SnapshotWriter,
    existing_snapshot,
    newest_version,
    snapshot_folder,
)

TOKEN = "FOREBAY_TOKEN"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 1 (2 for the user's mistake) after one line on stderr."""
    parser = argparse.ArgumentParser(prog="forebay.training.worker")
    parser.add_argument("--job", type=Path, required=True)
    rank = os.environ.get("RANK", "0")
    try:
        run, control_url = read_job(parser.parse_args(arguments).job)
        ranks = Ranks.join(run.config.training.step_timeout_s)
        trainer = _Trainer(run, ranks)
        if ranks.rank == 0:
            _Leader(run, control_url, ranks, trainer).train()
        else:
            _follow(trainer, ranks)
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


class _Trainer:
    """What every rank does alike."""

    def __init__(self, run: RunContext, ranks: Ranks) -> None:
        config = run.config
        training = config.training
        layout: dict[str, int | str] = {
            "backend": training.backend,
            "zero_stage": training.zero_stage if training.backend == "deepspeed" else 3,
            "dtype": config.model.dtype,
            "lora": training.lora.rank if training.lora else 0,
        }
        self.checkpoints = Checkpoints(run.checkpoints, ranks, layout, config.training.step_timeout_s)
        self.engine = TrainEngine(run, ranks)
        self.done = 0
        """Steps trained, in earlier lives too."""
        self.saved = 0
        """Step of the newest checkpoint."""
        self._config = config
        if (checkpoint := self.checkpoints.load()) is not None:
            self.done, state = checkpoint
            self.saved = self.done
            self.engine.load_state(state)

    def take(self, body: bytes) -> tuple[Chunk, dict[str, float] | None]:
        """Decode and accumulate a chunk; with the step's last one comes the update, and the step's metrics."""
        config = self._config
        chunk = decode_chunk(body, config.algorithm, config.generation.max_new_tokens, config.control.sync_every)
        self.engine.accumulate(chunk)
        return chunk, self.engine.update(chunk.step) if chunk.complete else None

    def is_published(self, step: int) -> bool:
        """Whether a snapshot follows this step."""
        return step % self._config.control.sync_every == 0

    def is_saved(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return step % self._config.training.checkpoint_every == 0

    def save(self, step: int, state: dict[str, Tensor], after: Future[None] | None = None) -> None:
        """Begin the checkpoint of this step, to be complete after `after`."""
        self.checkpoints.save(step, state, after)
        self.saved = step

    def drain(self, *, whole: bool) -> None:
        """Take part in gathering the weights without wanting them; all of them, or what a snapshot has."""
        for _ in self.engine.shards() if whole else self.engine.snapshot_shards():
            pass

    def finish(self, save_step: int | None) -> None:
        """The last checkpoint, if one is asked for; then until all that were begun are complete."""
        if save_step is not None:
            self.save(save_step, self.engine.state())
        self.checkpoints.wait()


def _follow(trainer: _Trainer, ranks: Ranks) -> None:
    while True:
        kind, body = ranks.receive()
        if kind is Message.STOP:
            orders = json.loads(body)
            trainer.finish(orders["save"])
            if orders["export"]:
                trainer.drain(whole=True)
            return
        chunk, metrics = trainer.take(body)
        if metrics is not None:
            if trainer.is_published(chunk.step):
                trainer.drain(whole=False)
            if trainer.is_saved(chunk.step):
                trainer.save(chunk.step, trainer.engine.state())


class _Leader:
    """Rank 0."""

    def __init__(self, run: RunContext, control_url: str, ranks: Ranks, trainer: _Trainer) -> None:
        self._run, self._ranks, self._trainer = run, ranks, trainer
        self._client = ControlClient(control_url, run.token, run.config.training.step_timeout_s)
        lora = run.config.training.lora
        self._writer = SnapshotWriter(run.start_model, run.config.model.dtype)
        adapters = AdapterWriter(run.start_model, lora) if lora and lora.publish == "adapter" else None
        self._publisher = Publisher(adapters or self._writer, self._announce)
        self._completion = run.root / "trainer_done.json"
        self._completion.unlink(missing_ok=True)
        run.snapshots.mkdir(parents=True, exist_ok=True)
        self._published = newest_version(run.snapshots)

    def train(self) -> None:
        """All steps, the trained model, the record of completion."""
        trainer, steps, reason = self._trainer, self._run.config.training.steps, None
        try:
            for step in range(trainer.done + 1, steps + 1):
                self._step(step)
        except RunOver as over:
            # After the last step the run is over in any case, and its last snapshot may come too late for anyone.
            reason = str(over) if trainer.done < steps else None
        self._publisher.wait()
        save = trainer.done if reason is not None and trainer.done > trainer.saved else None
        self._ranks.send(Message.STOP, json.dumps({"export": reason is None, "save": save}).encode())
        trainer.finish(save)
        if reason is None:
            version = -(-steps // self._run.config.control.sync_every)
            self._export(self._run.trained_model, version)
        _record(self._completion, {"steps": trainer.done, "reason": reason})

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        metrics, waited = self._train(step)
        trained = time.perf_counter()
        publish = self._snapshot(step) if self._trainer.is_published(step) else None
        state = self._trainer.engine.state() if self._trainer.is_saved(step) else None
        published = time.perf_counter()
        self._client.report_step(
            step,
            train_wait_s=waited,
            train_s=trained - began - waited,
            publish_s=published - trained,
            metrics=metrics,
        )
        self._trainer.done = step
        if publish is not None:
            publish()
        # Not before the report: what a checkpoint holds, the Control Unit has heard of.
        if state is not None:
            self._trainer.save(step, state, self._publisher.pending)

    def _train(self, step: int) -> tuple[dict[str, float], float]:
        """(metrics, seconds spent waiting for groups). Streaming: chunk after chunk, as they come."""
        streaming, received, waited = self._run.config.streaming, 0, 0.0
        version = None
        while True:
            asked = time.perf_counter()
            body = self._await_groups(step, received if streaming else None)
            waited += time.perf_counter() - asked
            self._ranks.send(Message.BATCH, body)
            chunk, metrics = self._trainer.take(body)
            version = chunk.version if version is None else version
            if (chunk.step, chunk.version) != (step, version):
                raise RunError(
                    f"the Control Unit sent groups of step {chunk.step}, version {chunk.version}, not of step {step}, "
                    f"version {version}"
                )
            received += chunk.totals.groups
            if metrics is not None:
                return metrics, waited

    def _await_groups(self, step: int, received: int | None) -> bytes:
        while True:
            self._publisher.check()
            if (saved := self._trainer.checkpoints.finished()) is not None:
                self._client.report_checkpoint(saved)
            body = self._client.next_batch(step, received)
            if body is not None:
                return body
            self._ranks.send(Message.WAIT)

    def _snapshot(self, step: int) -> Callable[[], None] | None:
        """Gathers the weights; what is returned hands them over to be written and announced. None if a trainer that
        died had gone on to a later version: then nobody waits for this one."""
        version = step // self._run.config.control.sync_every
        if version < self._published:
            self._trainer.drain(whole=False)
            return None
        folder = snapshot_folder(self._run.snapshots, version)
        # If a trainer that died had written it, that one: engines may have it already.
        if (snapshot := existing_snapshot(folder, version)) is not None:
            self._trainer.drain(whole=False)
            return partial(self._publisher.repeat, snapshot)
        self._publisher.wait()
        return partial(self._publisher.publish, folder, version, list(self._trainer.engine.snapshot_shards()))

    def _announce(self, snapshot: Snapshot) -> None:
        # That the run is over the training hears itself.
        with contextlib.suppress(RunOver):
            self._client.report_snapshot(snapshot)

    def _export(self, folder: Path, version: int) -> None:
        """The trained model; or, if a trainer that died had written it, that one."""
        if existing_snapshot(folder, version) is not None:
            self._trainer.drain(whole=True)
        else:
            self._writer.write(folder, version, self._trainer.engine.shards())


def _record(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # as in Ranks.leave: no interpreter shutdown under live gloo threads
