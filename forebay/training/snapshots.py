"""Snapshots: a policy version's weights as a complete Hugging Face folder with a manifest; or its adapters alone.

Invariants:
- A folder under its final name is complete and on the disk: it is written under a hidden name, manifest last, then
  renamed.
- `manifest.json` = {"version": int, "files": {name: {"bytes", "sha256"}}, "tensors": {name: {"shape", "dtype"}}} lists
  every other file; its own SHA-256 (in `Snapshot`) therefore pins every byte.
- Tensors have hub names; a tied weight is there once, as in the start model.
- Adapters alone (`forebay.adapters` says how they are named) are for what has the start model: then the manifest has
  "adapter": {"scale": float, "base": {name: SHA-256}} besides, the start model's files of weights.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from forebay.adapters import base_digests
from forebay.config import LoraConfig
from forebay.control.types import Snapshot
from forebay.errors import RunError

MANIFEST = "manifest.json"
KEEP = 3
"""Snapshots kept: the newest, the one an engine may be loading, and one more for an engine that lags."""
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
_VERSION_FOLDER = re.compile(r"v\d{8,}")
_STRAY_FOLDER = re.compile(r"\.v\d{8,}\.tmp-\d+")


class SnapshotWriter:
    """Holds what all snapshots of a run share: the config and the tokenizer's files of the start model."""

    def __init__(self, start_model: Path, dtype: str) -> None:
        """`dtype`: name of the weights' type, written into config.json. Raises `RunError` if there is no config."""
        try:
            config = json.loads((start_model / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{start_model}/config.json cannot be read ({error})") from None
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        self._shared = {name: (start_model / name).read_bytes() for name in COMPANIONS if (start_model / name).exists()}
        self._shared["config.json"] = json.dumps(config, indent=2).encode()
        self._hashes = {name: _entry(data) for name, data in self._shared.items()}
        self._stem, self._more = "model", dict[str, Any]()

    def write(self, folder: Path, version: int, shards: Iterable[Sequence[tuple[str, Tensor]]]) -> Snapshot:
        """Write the shards (one safetensors file each) and everything else into `folder`, which must not exist, and
        have it all on the disk. Raises `RunError` on a full disk or if `folder` is there already.
        """
        temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            digest = self._fill(temporary, version, shards)
            if folder.exists():
                raise FileExistsError(f"{folder} is there already")
            temporary.rename(folder)
            sync_to_disk(folder.parent)
        except OSError as error:
            raise RunError(f"cannot write the weights of version {version} to {folder}: {error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Snapshot(version, str(folder), digest)

    def _fill(self, folder: Path, version: int, shards: Iterable[Sequence[tuple[str, Tensor]]]) -> str:
        files, tensors, places = dict(self._hashes), {}, {}
        total = 0
        names: list[str] = []
        for name, data in self._shared.items():
            _write(folder / name, data)
        for shard in shards:
            name = f"{self._stem}-{len(names) + 1:05d}.safetensors"
            # One copy of one shard in memory: hashed and written from the same bytes.
            data = save(dict(shard), metadata={"format": "pt"})
            _write(folder / name, data)
            files[name] = _entry(data)
            names.append(name)
            for key, tensor in shard:
                tensors[key] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                places[key] = name
                total += tensor.nbytes
        if len(names) == 1:
            (folder / names[0]).rename(folder / f"{self._stem}.safetensors")
            files[f"{self._stem}.safetensors"] = files.pop(names[0])
        else:
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()
            _write(folder / "model.safetensors.index.json", index)
            files["model.safetensors.index.json"] = _entry(index)
        manifest = json.dumps({"version": version, "files": files, "tensors": tensors} | self._more, indent=1).encode()
        _write(folder / MANIFEST, manifest)
        sync_to_disk(folder)
        return hashlib.sha256(manifest).hexdigest()


class AdapterWriter(SnapshotWriter):
    """Writes snapshots of adapters alone, one shard each."""

    def __init__(self, start_model: Path, lora: LoraConfig) -> None:
        self._shared, self._hashes = {}, {}
        self._stem = "adapter_model"
        self._more = {"adapter": {"scale": lora.alpha / lora.rank, "base": base_digests(start_model)}}


def snapshot_folder(snapshots: Path, version: int) -> Path:
    """`v00000007` for version 7."""
    return snapshots / f"v{version:08d}"


def newest_version(snapshots: Path) -> int:
    """Of the snapshots there; 0 if there is none."""
    return max((int(p.name[1:]) for p in snapshots.iterdir() if _VERSION_FOLDER.fullmatch(p.name)), default=0)


def existing_snapshot(folder: Path, version: int) -> Snapshot | None:
    """The complete snapshot that lies there, as `SnapshotWriter.write` returned it; None if there is no folder. Raises
    `RunError` if it is something else."""
    if not folder.exists():
        return None
    if read_manifest(folder)["version"] != version:
        raise RunError(f"{folder} is there already and does not hold version {version}")
    return Snapshot(version, str(folder), hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())


def prune(snapshots: Path, keep: int = KEEP) -> None:
    """Remove all but the newest `keep` snapshots, and what a killed writer left behind."""
    names = sorted((p.name for p in snapshots.iterdir() if _VERSION_FOLDER.fullmatch(p.name)), key=lambda n: int(n[1:]))
    strays = [p.name for p in snapshots.iterdir() if _STRAY_FOLDER.fullmatch(p.name)]
    for name in [*names[: max(len(names) - keep, 0)], *strays]:
        shutil.rmtree(snapshots / name, ignore_errors=True)


def read_manifest(folder: Path, manifest_sha256: str | None = None) -> dict[str, Any]:
    """The manifest; with a hash given, only if it is that very one. Raises `RunError`."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise RunError(f"{folder} has no readable {MANIFEST} ({error.strerror}); not a complete snapshot") from None
    if manifest_sha256 is not None and hashlib.sha256(data).hexdigest() != manifest_sha256:
        raise RunError(f"{folder}/{MANIFEST} is not the one that was published (its SHA-256 differs)")
    try:
        manifest: dict[str, Any] = json.loads(data)
        if {"version", "files", "tensors"} <= manifest.keys():
            return manifest
    except (ValueError, AttributeError):
        pass
    raise RunError(f"{folder}/{MANIFEST} is not a manifest")


def verify_files(folder: Path, manifest_sha256: str | None = None) -> dict[str, Any]:
    """Read every byte and compare with the manifest, which is returned; raises `RunError` naming the bad file."""
    manifest = read_manifest(folder, manifest_sha256)
    for name, expected in manifest["files"].items():
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise RunError(f"{path} is in the manifest but is not a file there")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise RunError(f"{path} is damaged: its SHA-256 is {found[:12]}..., not {expected['sha256'][:12]}...")
    return manifest


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        # An unbuffered write may be partial (Linux writes at most 2 GiB at a time).
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def sync_to_disk(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
