"""The store on a local folder: whole or not at all, never changed, one-line errors."""

import errno
import hashlib
import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import RunConfig, StorageConfig, parse_config
from forebay.errors import ForebayError, RunError, UserError
from forebay.run import RunContext
from forebay.storage import objects
from forebay.storage.objects import LocalObjects, ObjectExistsError
from forebay.storage.publish import finite, publish
from forebay.storage.store import MANIFEST, AlreadyPublished, Store, tree_files

_NAME = st.text("abcdef01 _-.é", min_size=1, max_size=8).filter(lambda name: name.strip(".") != "")
_TREES = st.dictionaries(
    st.lists(_NAME, min_size=1, max_size=3).map("/".join), st.binary(max_size=200), max_size=6
).filter(
    # A name cannot be a file and a folder at once.
    lambda tree: not any(other.startswith(name + "/") for name in tree for other in tree)
)


def _write(folder: Path, tree: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _read(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in tree_files(folder).items()} if folder.exists() else {}


def _store(folder: Path) -> Store:
    return Store(f"file://{folder}")


@settings(max_examples=40, deadline=None)
@given(tree=_TREES)
def test_a_published_tree_comes_back_identical(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes]
) -> None:
    tmp = tmp_path_factory.mktemp("tree")
    store = _store(tmp / "store")
    written = store.publish_tree(_write(tmp / "local", tree), "a/run", {"note": "n"})
    assert store.list_published() == ["a/run"]
    assert store.fetch_tree("a/run", tmp / "back") == written
    assert _read(tmp / "back") == tree
    assert written["note"] == "n"
    assert written["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in tree.items()
    }


@settings(max_examples=40, deadline=None)
@given(tree=_TREES.filter(bool), data=st.data())
def test_an_interrupted_publication_is_invisible_and_can_be_repeated(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], data: st.DataObject
) -> None:
    tmp = tmp_path_factory.mktemp("tree")
    store, local = _store(tmp / "store"), _write(tmp / "local", tree)
    # Every write operation of the store is a step; the machine stops at one of them.
    stop_at = data.draw(st.integers(0, len(tree)))
    steps = 0

    def stopping(operation):
        def wrapped(*args: object) -> None:
            nonlocal steps
            if steps == stop_at:
                raise KeyboardInterrupt
            steps += 1
            operation(*args)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._objects, "upload", stopping(store._objects.upload))
        patch.setattr(store._objects, "create", stopping(store._objects.create))
        with pytest.raises(KeyboardInterrupt):
            store.publish_tree(local, "run")
    assert store.list_published() == []
    with pytest.raises(UserError, match="nothing is published here"):
        store.fetch_tree("run", tmp / "back")
    assert _read(tmp / "back") == {}
    store.publish_tree(local, "run")
    store.fetch_tree("run", tmp / "back")
    assert _read(tmp / "back") == tree


def test_the_manifest_is_written_after_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, order = _store(tmp_path / "store"), []
    for operation in ("upload", "create", "replace"):
        real = getattr(store._objects, operation)
        key_at = 1 if operation == "upload" else 0
        monkeypatch.setattr(store._objects, operation, lambda *a, r=real, k=key_at: (order.append(a[k]), r(*a)))
    store.publish_tree(_write(tmp_path / "local", {"b": b"1", "z/a": b"2"}), "run")
    assert order == ["run/b", "run/z/a", "run/MANIFEST.json"]


def test_publishing_again_is_a_no_op_for_the_same_files_and_refused_for_others(tmp_path: Path) -> None:
    store, local = _store(tmp_path / "store"), _write(tmp_path / "local", {"a": b"one"})
    first = store.publish_tree(local, "run", {"attempt": 1})
    assert store.publish_tree(local, "run", {"attempt": 2}) == first
    (local / "a").write_bytes(b"two")
    with pytest.raises(AlreadyPublished, match="run: other files are published here already"):
        store.publish_tree(local, "run")
    store.fetch_tree("run", tmp_path / "back")
    assert _read(tmp_path / "back") == {"a": b"one"}


def test_one_of_many_racing_writers_creates_the_object(tmp_path: Path) -> None:
    store, barrier, outcomes = LocalObjects(tmp_path), threading.Barrier(8), []

    def write(number: int) -> None:
        barrier.wait()
        try:
            store.create("x/key", str(number).encode())
            outcomes.append(number)
        except ObjectExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number in outcomes if number is not None]
    assert len(outcomes) == 8
    assert [store.read("x/key")] == [str(number).encode() for number in winners]
    assert store.list_keys() == ["x/key"]


@pytest.mark.parametrize("damage", [b"onf", b"twoo", None])
def test_a_damaged_or_missing_file_is_never_handed_out(tmp_path: Path, damage: bytes | None) -> None:
    store = _store(tmp_path / "store")
    store.publish_tree(_write(tmp_path / "local", {"a": b"one"}), "run")
    (tmp_path / "store/run/a").unlink()
    if damage is not None:
        (tmp_path / "store/run/a").write_bytes(damage)
    with pytest.raises(RunError, match="run/a: damaged" if damage else "run/a: its manifest names this file"):
        store.fetch_tree("run", tmp_path / "back")
    assert _read(tmp_path / "back") == {}


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "", "a//b"])
def test_a_manifest_cannot_name_a_file_outside_its_tree(tmp_path: Path, name: str) -> None:
    store = _store(tmp_path / "store")
    store.publish_tree(_write(tmp_path / "local", {"a": b"one"}), "run")
    manifest = json.loads((tmp_path / "store/run" / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"].pop("a")
    (tmp_path / "store/run" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"MANIFEST\.json: damaged"):
        store.fetch_tree("run", tmp_path / "back")


@pytest.mark.parametrize("text", ["", "[1]", '{"files": {"a": 3}}', '{"files"', '{"created": "x"}'])
def test_a_damaged_manifest_is_one_line(tmp_path: Path, text: str) -> None:
    store = _store(tmp_path / "store")
    (tmp_path / "store/run").mkdir(parents=True)
    (tmp_path / "store/run" / MANIFEST).write_text(text)
    with pytest.raises(RunError, match=r"MANIFEST\.json: damaged") as caught:
        store.read_manifest("run")
    assert "\n" not in str(caught.value)


def test_a_short_upload_is_noticed_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path / "store")
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: Path(target).write_bytes(b"on"))
    with pytest.raises(RunError, match="run/a: has 2 bytes after the upload, not 3"):
        store.publish_tree(_write(tmp_path / "local", {"a": b"one"}), "run")
    assert store.list_published() == []


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, RunError, "no space left"),
        (errno.EACCES, UserError, "permission denied"),
        (errno.EIO, RunError, "I"),
    ],
)
@pytest.mark.parametrize("where", ["copyfile", "fsync"])
def test_disk_trouble_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ForebayError], text: str, where: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, errno.errorcode[code], str(tmp_path / "store/run/a"))

    store = _store(tmp_path / "store")
    monkeypatch.setattr(shutil if where == "copyfile" else objects.os, where, fail)
    with pytest.raises(kind, match=text) as caught:
        store.publish_tree(_write(tmp_path / "local", {"a": b"one"}), "run")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert store.list_published() == []


def test_a_file_in_the_way_of_the_store_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(UserError, match="a file lies where a folder should be"):
        _store(tmp_path / "store").check()


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    _store(tmp_path / "store").check()
    assert _read(tmp_path / "store") == {}


@pytest.mark.parametrize("uri", ["gs://x", "runs", "file://", "s3://", "s3:///"])
def test_an_impossible_uri_is_the_users_mistake(uri: str) -> None:
    with pytest.raises(UserError, match="write file://DIR or s3://BUCKET/PREFIX"):
        Store(uri)


@pytest.mark.parametrize("place", ["uri", "endpoint"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(place: str) -> None:
    uri, endpoint = ("s3://key:hunter2@bucket/x", None) if place == "uri" else ("s3://b/x", "http://key:hunter2@host")
    with pytest.raises(UserError, match="no credentials in a URI") as caught:
        Store(uri, endpoint)
    assert "hunter2" not in str(caught.value)


def test_an_s3_store_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "visible-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    store = Store("s3://bucket/x", "http://127.0.0.1:1")
    texts = [repr(store), repr(store._objects), repr(vars(store._objects)), repr(vars(store._objects._fs))]
    assert not any("hunter2" in text or "visible-key" in text for text in texts)


def test_the_stores_own_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=MANIFEST):
        _store(tmp_path / "store").publish_tree(_write(tmp_path / "local", {f"sub/{MANIFEST}": b"{}"}), "run")


def test_a_link_to_a_folder_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    local = _write(tmp_path / "local", {"a": b"one"})
    (local / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="link to a folder"):
        tree_files(local)


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    monkeypatch.chdir(tmp_path)
    run = RunContext.create(RunConfig(name="r", storage=StorageConfig(uri="file://out")))
    for name in ("metrics.jsonl", "ledger.parquet", "trainer.json", "logs/engine.log"):
        (run.root / name).write_bytes(name.encode())
    for name in ("data/train.parquet", "data/test.parquet", "lengths/profile.parquet", "schedule/schedule.parquet"):
        (run.root / name).parent.mkdir(exist_ok=True)
        (run.root / name).write_bytes(name.encode())
    _write(run.trained_model, {"model.safetensors": b"weights", "manifest.json": b"{}"})
    return run


def test_a_completed_run_is_published_whole_and_becomes_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path, monkeypatch)
    summary = {"status": "completed", "lengths": {"spearman": float("nan")}, "wall_s": 3.5}
    uri = publish(run, summary)
    assert uri == f"file://out/{run.run_id}"
    store = Store("file://out")
    assert store.list_published() == [run.run_id]
    manifest = store.fetch_tree(run.run_id, tmp_path / "back")
    assert (manifest["run_id"], manifest["status"], manifest["mode"]) == (run.run_id, "completed", "fully_async")
    assert set(_read(tmp_path / "back")) == {
        "config.yaml",
        "data/test.parquet",
        "data/train.parquet",
        "ledger.parquet",
        "lengths/profile.parquet",
        "metrics.jsonl",
        "model/manifest.json",
        "model/model.safetensors",
        "schedule/schedule.parquet",
        "summary.json",
    }
    assert parse_config(yaml.safe_load((tmp_path / "back/config.yaml").read_text()), "config.yaml") == run.config
    stored = {"status": "completed", "lengths": {"spearman": None}, "wall_s": 3.5}
    assert json.loads((tmp_path / "back/summary.json").read_text()) == stored
    assert store.read_json("latest.json") == {"run_id": run.run_id, "summary": stored}
    everything = b"".join(_read(tmp_path / "out").values())
    assert run.token.encode() not in everything
    assert publish(run, summary) == uri, "a retry of the task must not fail"


def test_a_failed_run_is_published_without_model_and_does_not_become_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path, monkeypatch)
    publish(run, {"status": "failed", "error": "engine 0 died"})
    store = Store("file://out")
    files = store.read_manifest(run.run_id)["files"]
    assert "summary.json" in files
    assert not any(name.startswith("model/") for name in files)
    assert store.read_json("latest.json") is None


def test_a_run_without_model_cannot_have_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, monkeypatch)
    shutil.rmtree(run.trained_model)
    with pytest.raises(RunError, match="there is no model in"):
        publish(run, {"status": "completed"})
    assert Store("file://out").list_published() == []


def test_finite_keeps_everything_else() -> None:
    value = {"a": [1, 2.5, float("inf"), {"b": (True, None, "x", float("-inf"))}]}
    assert finite(value) == {"a": [1, 2.5, None, {"b": [True, None, "x", None]}]}
