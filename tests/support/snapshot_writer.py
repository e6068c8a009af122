"""Writes snapshots in the published format, independently of `forebay.training.snapshots`."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forebay.control.types import Snapshot


def seal(folder: Path, version: int, tensors: dict[str, torch.Tensor]) -> Snapshot:
    """Write the manifest for the files that lie in `folder` and the tensors they should hold."""
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "manifest.json"}
    manifest = {
        "version": version,
        "files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()},
        "tensors": {n: {"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1]} for n, t in tensors.items()},
    }
    raw = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(raw)
    return Snapshot(version, str(folder), hashlib.sha256(raw).hexdigest())


def write_snapshot(model_dir: Path, folder: Path, version: int, change=None) -> Snapshot:
    """A snapshot of the model in `model_dir`; `change` may edit the dictionary of tensors first."""
    folder.mkdir(parents=True)
    tensors = load_file(model_dir / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model_dir / "config.json", folder)
    return seal(folder, version, tensors)
