"""Weight refresh inside a vLLM worker: stage and verify while decoding goes on, then swap in one call.

Invariants:
- Nothing of the served model is touched before the whole snapshot is read and verified against its manifest.
- The swap is one call to the worker, so no decoding step ever sees a half-loaded model; if it fails half-way, the
  process ends at once instead of serving weights that nobody published.
- On CPU all the work of loading is done while decoding goes on (`forebay.generation.twin`); elsewhere in the swap.
"""

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from forebay.generation import twin
from forebay.generation.base import Base, SnapshotRefused

logger = logging.getLogger(__name__)

HALF_LOADED_EXIT_CODE = 70


@dataclass
class SnapshotInit(WeightTransferInitInfo):
    """Nothing to set up."""


@dataclass
class SnapshotUpdate(WeightTransferUpdateInfo):
    """One of the two steps of a refresh."""

    action: Literal["stage", "swap"]
    path: str = ""
    version: int = 0
    manifest_sha256: str = ""


class Staging:
    """Reads, verifies and prepares one snapshot in a thread; decoding goes on."""

    def __init__(self, update: SnapshotUpdate, base: Base, model: Any, model_config: Any) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.twin: Any = None
        """The prepared weights; None where the swap has to load `tensors`."""
        self.error: str | None = f"snapshot {update.path} could not be read; see the server's log"
        self._update, self._base, self._model, self._model_config = update, base, model, model_config
        self._thread = threading.Thread(target=self._run, name="forebay-staging", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Raises `SnapshotRefused` unless all is ready."""
        self._thread.join()
        if self.error is not None:
            raise SnapshotRefused(self.error)

    def _run(self) -> None:
        try:
            dtype = self._model_config.dtype
            assert isinstance(dtype, torch.dtype)  # vLLM resolves names at start
            tensors = read_snapshot(self._update, self._base, dtype)
            if twin.possible(self._model_config):
                self.twin = twin.make_twin(self._model, self._model_config, tensors)
            else:
                self.tensors = tensors
            self.error = None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            # Whatever is wrong with the files (safetensors raises its own subclass of ValueError or RuntimeError).
            self.error = f"snapshot {self._update.path} is refused: {error or type(error).__name__}"


def read_snapshot(update: SnapshotUpdate, base: Base, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a snapshot, verified: manifest digest, version, file digests, names, shapes, types, finiteness. An
    adapter's is that of the base with the adapter in it."""
    folder = Path(update.path)
    raw = (folder / "manifest.json").read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != update.manifest_sha256:
        raise SnapshotRefused(f"manifest.json has SHA-256 {digest}, announced was {update.manifest_sha256}")
    manifest = json.loads(raw)
    if manifest["version"] != update.version:
        raise SnapshotRefused(f"it is version {manifest['version']}, announced was {update.version}")
    adapter = manifest.get("adapter")
    if adapter is None:
        _compare_shapes({name: entry["shape"] for name, entry in manifest["tensors"].items()}, base.shapes)
    tensors = []
    for name, entry in manifest["files"].items():
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise SnapshotRefused(f"{name} has SHA-256 {digest}, its manifest says {entry['sha256']}")
        if name.endswith(".safetensors"):
            with safe_open(folder / name, framework="pt") as opened:
                tensors += [(key, opened.get_tensor(key)) for key in opened.keys()]  # noqa: SIM118 (no mapping)
    _check_tensors(tensors, manifest["tensors"], dtype if adapter is None else torch.float32)
    return tensors if adapter is None else base.merge(dict(tensors), adapter, dtype)


def _compare_shapes(given: dict[str, list[int]], served: dict[str, list[int]]) -> None:
    for name in sorted(served.keys() - given.keys()):
        raise SnapshotRefused(f"tensor {name} is missing")
    for name in sorted(given.keys() - served.keys()):
        raise SnapshotRefused(f"tensor {name} is not in the served model")
    for name, shape in given.items():
        if list(shape) != list(served[name]):
            raise SnapshotRefused(f"tensor {name} has shape {list(shape)}, the served model has {list(served[name])}")


def _check_tensors(tensors: list[tuple[str, torch.Tensor]], entries: dict[str, Any], dtype: torch.dtype) -> None:
    if sorted(name for name, _ in tensors) != sorted(entries):
        raise SnapshotRefused("its files do not hold exactly the tensors that its manifest lists")
    for name, tensor in tensors:
        entry = entries[name]
        if list(tensor.shape) != list(entry["shape"]) or f"torch.{entry['dtype']}" != str(tensor.dtype):
            raise SnapshotRefused(f"tensor {name} is {list(tensor.shape)} {tensor.dtype}, its manifest says {entry}")
        if tensor.dtype != dtype:
            raise SnapshotRefused(f"tensor {name} is {tensor.dtype}, the engine serves {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise SnapshotRefused(f"tensor {name} has values that are not finite")


class SnapshotEngine(WeightTransferEngine[SnapshotInit, SnapshotUpdate]):
    """vLLM's side of `VllmEngine.refresh`: start and update(stage) by `SnapshotWorker.forebay_stage`, then
    [staging_state ...], then update(swap) and finish by `forebay.generation.engine_core.refresh`."""

    init_info_cls = SnapshotInit
    update_info_cls = SnapshotUpdate
    supports_draft_weight_update = False
    staging: Staging | None = None
    _base: Base | None = None

    def init_transfer_engine(self, init_info: SnapshotInit) -> None:
        self._base = Base(self.model_config.model)

    def start_weight_update(self) -> None:
        self.staging = None

    def finish_weight_update(self) -> None:
        self.staging = None

    def shutdown(self) -> None:
        self.staging = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, but without an accelerator there is nothing to synchronize."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SnapshotUpdate) -> None:
        if update_info.action == "stage":
            if self._base is None:
                self._base = Base(self.model_config.model)
            self.staging = Staging(update_info, self._base, self.model, self.model_config)
            return
        if self.staging is None:
            raise SnapshotRefused("swap without stage")
        self.staging.wait()
        done = False
        try:
            if self.staging.twin is None:
                twin.load(self.model, self.model_config, self.staging.tensors)
            else:
                twin.exchange(self.model, self.staging.twin)
            done = True
        finally:
            if not done:
                logger.exception("The weights are half loaded: this process ends now.")
                logging.shutdown()
                os._exit(HALF_LOADED_EXIT_CODE)


class SnapshotWorker:
    """Mixed into vLLM's worker (`--worker-extension-cls`): staging is begun in one call, since on a small model the
    calls of a refresh cost as much as its work, and the client asks whether it is done."""

    def forebay_stage(self, update: dict[str, Any]) -> None:
        """Begin a refresh: read, verify and prepare a snapshot. `update`: a `SnapshotUpdate` less its action."""
        worker: Any = self
        if worker._weight_update_active:  # whoever began that one never heard that it had
            worker.finish_weight_update()
        worker.start_weight_update()
        worker.update_weights({"action": "stage", **update})

    def forebay_staging_state(self) -> str:
        """The word staging or staged, or else why the snapshot is refused."""
        staging = self.weight_transfer_engine.staging  # type: ignore[attr-defined]
        if staging is None:
            return "nothing is staged"
        if not staging.done():
            return "staging"
        return staging.error or "staged"
