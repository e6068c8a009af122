import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forebay.errors import RunError
from forebay.training.snapshots import KEEP, SnapshotWriter, prune, read_manifest, snapshot_folder, verify_files

TENSORS = [("a.weight", torch.arange(6.0).view(2, 3)), ("b.weight", torch.ones(4, dtype=torch.bfloat16))]


@pytest.fixture
def writer(tmp_path: Path) -> SnapshotWriter:
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "float16"}')
    (start / "tokenizer.json").write_text("{}")
    (start / "model.safetensors").write_bytes(b"not copied")
    return SnapshotWriter(start, "float32")


def test_a_snapshot_reads_back_and_is_pinned_by_its_manifest(writer: SnapshotWriter, tmp_path: Path) -> None:
    snapshot = writer.write(snapshot_folder(tmp_path / "s", 3), 3, [TENSORS])
    folder = Path(snapshot.path)
    assert folder.name == "v00000003"
    manifest = verify_files(folder, snapshot.manifest_sha256)
    assert manifest["version"] == snapshot.version == 3
    assert manifest["tensors"] == {
        "a.weight": {"shape": [2, 3], "dtype": "float32"},
        "b.weight": {"shape": [4], "dtype": "bfloat16"},
    }
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS)
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}


def test_shards_have_an_index(writer: SnapshotWriter, tmp_path: Path) -> None:
    snapshot = writer.write(tmp_path / "model", 1, [TENSORS[:1], TENSORS[1:]])
    folder = Path(snapshot.path)
    verify_files(folder, snapshot.manifest_sha256)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6 * 4 + 4 * 2}
    for name, tensor in TENSORS:
        assert torch.equal(load_file(folder / index["weight_map"][name])[name], tensor)


@pytest.mark.parametrize("victim", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_or_missing_file_is_named(writer: SnapshotWriter, tmp_path: Path, victim: str) -> None:
    snapshot = writer.write(tmp_path / "model", 1, [TENSORS])
    path = Path(snapshot.path) / victim
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=f"{victim} is damaged"):
        verify_files(Path(snapshot.path), snapshot.manifest_sha256)
    path.unlink()
    with pytest.raises(RunError, match=f"{victim} is in the manifest"):
        verify_files(Path(snapshot.path), snapshot.manifest_sha256)


def test_another_manifest_is_refused(writer: SnapshotWriter, tmp_path: Path) -> None:
    first = writer.write(tmp_path / "a", 1, [TENSORS])
    second = writer.write(tmp_path / "b", 2, [TENSORS])
    with pytest.raises(RunError, match="not the one that was published"):
        read_manifest(Path(second.path), first.manifest_sha256)
    (tmp_path / "b" / "manifest.json").write_text("[]")
    with pytest.raises(RunError, match="is not a manifest"):
        read_manifest(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    with pytest.raises(RunError, match="not a complete snapshot"):
        read_manifest(tmp_path / "b")


def test_a_file_outside_the_folder_is_never_read(writer: SnapshotWriter, tmp_path: Path) -> None:
    snapshot = writer.write(tmp_path / "a", 1, [TENSORS])
    path = Path(snapshot.path) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../start/config.json"] = manifest["files"]["config.json"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="is in the manifest but is not a file there"):
        verify_files(tmp_path / "a")


def test_a_failed_write_leaves_nothing(writer: SnapshotWriter, tmp_path: Path) -> None:
    def broken():
        yield TENSORS
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"version 5 to .*: .*No space left on device"):
        writer.write(tmp_path / "s" / "v00000005", 5, broken())
    assert list((tmp_path / "s").iterdir()) == []


def test_an_existing_folder_is_not_touched(writer: SnapshotWriter, tmp_path: Path) -> None:
    first = writer.write(tmp_path / "m", 1, [TENSORS])
    with pytest.raises(RunError, match="is there already"):
        writer.write(tmp_path / "m", 2, [TENSORS])
    verify_files(tmp_path / "m", first.manifest_sha256)


def test_prune_keeps_the_newest_and_clears_up_after_a_killed_writer(writer: SnapshotWriter, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    for version in range(8, 14):
        writer.write(snapshot_folder(folder, version), version, [TENSORS])
    (folder / ".v00000014.tmp-1234").mkdir()
    (folder / "notes").mkdir()
    prune(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["notes", *(f"v{v:08d}" for v in range(14 - KEEP, 14))]
