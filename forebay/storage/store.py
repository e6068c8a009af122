"""`Store`: trees of files, published whole or not at all.

Invariants:
- Data first, manifest last: `<prefix>/MANIFEST.json` names every file with size and SHA-256, and is written only if
  absent, after the size of every stored file was checked. A tree without it is invisible to readers.
- Readers trust only manifests: what a manifest does not name does not exist, what it names is verified by its hash.
- A published tree never changes: publishing the same files again is a no-op, publishing others is refused.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from forebay.errors import RunError, UserError
from forebay.storage.objects import ObjectExistsError, open_objects

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class StoredFile:
    """One file of a published tree, as its manifest has it."""

    bytes: int
    sha256: str


class AlreadyPublished(RunError):
    """Another tree was published under this prefix; it stays as it is."""


class Store:
    """Published trees and small JSON documents under one URI (`file://DIR` or `s3://BUCKET/PREFIX`)."""

    def __init__(self, uri: str, endpoint_url: str | None = None) -> None:
        """Contacts nobody; raises `UserError` for a URI that cannot be one or that carries credentials."""
        self._objects = open_objects(uri, endpoint_url)
        self.uri = uri.rstrip("/")

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def check(self) -> None:
        """Write, read and delete a small object: raises now what publishing would raise after hours of training."""
        key = f".check-{uuid.uuid4().hex}"
        self._objects.replace(key, b"forebay")
        if self._objects.read(key) != b"forebay":
            raise RunError(f"{self.uri}: an object that was just written reads back differently")
        self._objects.delete(key)

    def publish_tree(self, local: Path, prefix: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Publish all files below a folder; see `publish_files`."""
        return self.publish_files(tree_files(local), prefix, extra)

    def publish_files(
        self, files: Mapping[str, Path], prefix: str, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Publish local files under `<prefix>/<name>`; `extra` goes into the manifest, which is returned.

        Raises `AlreadyPublished` if other files were published under this prefix.
        """
        for name in files:
            if PurePosixPath(name).name == MANIFEST:
                raise UserError(f"{files[name]}: cannot be published, the name {MANIFEST} is the store's own")
            _check_name(name)
        entries = {name: _describe(path) for name, path in sorted(files.items())}
        if (published := self._published(prefix, entries)) is not None:
            return published
        for name, entry in entries.items():
            key = f"{prefix}/{name}"
            self._objects.upload(files[name], key)
            size = self._objects.size(key)
            if size != entry.bytes:
                raise RunError(f"{self.uri}/{key}: has {size} bytes after the upload, not {entry.bytes}; publish again")
        manifest = {
            **(extra or {}),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in entries.items()},
        }
        try:
            self._objects.create(f"{prefix}/{MANIFEST}", _encode(manifest))
        except ObjectExistsError:
            # Another writer, or our own first attempt whose answer got lost on the way.
            published = self._published(prefix, entries)
            if published is None:
                raise
            return published
        return manifest

    def read_manifest(self, prefix: str) -> dict[str, Any]:
        """The manifest of a published tree; raises `UserError` if there is none, `RunError` if it is damaged."""
        manifest = self.read_json(f"{prefix}/{MANIFEST}")
        if manifest is None:
            raise UserError(f"{self.uri}/{prefix}: nothing is published here")
        self._stored_files(prefix, manifest)
        return manifest

    def list_published(self) -> list[str]:
        """The prefixes of all published trees, sorted."""
        paths = (PurePosixPath(key) for key in self._objects.list_keys())
        return sorted(str(path.parent) for path in paths if path.name == MANIFEST)

    def fetch_tree(self, prefix: str, local: Path) -> dict[str, Any]:
        """Copy a published tree to a folder, each file verified before it gets its name; returns the manifest."""
        manifest = self.read_manifest(prefix)
        for name, entry in self._stored_files(prefix, manifest).items():
            self._fetch(prefix, name, entry, local)
        return manifest

    def fetch_file(self, prefix: str, name: str, local: Path) -> Path:
        """Copy one file of a published tree to a folder, verified; raises `UserError` if the tree has no such file."""
        entry = self._stored_files(prefix, self.read_manifest(prefix)).get(name)
        if entry is None:
            raise UserError(f"{self.uri}/{prefix}: has no {name}")
        return self._fetch(prefix, name, entry, local)

    def put_json(self, key: str, value: Mapping[str, Any]) -> None:
        """Write a JSON document; readers see the old one or the new one."""
        self._objects.replace(key, _encode(value))

    def read_json(self, key: str) -> dict[str, Any] | None:
        """A JSON document; None if there is none; raises `RunError` if it is damaged."""
        data = self._objects.read(key)
        if data is None:
            return None
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RunError(f"{self.uri}/{key}: damaged, not a JSON object")
        return value

    def _fetch(self, prefix: str, name: str, entry: StoredFile, local: Path) -> Path:
        """The file gets its name when it is whole and matches its manifest."""
        target = local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{uuid.uuid4().hex}.partial"
        try:
            self._objects.download(f"{prefix}/{name}", partial)
            if _describe(partial) != entry:
                raise RunError(f"{self.uri}/{prefix}/{name}: damaged, it does not match its manifest")
            os.replace(partial, target)
        except FileNotFoundError:
            raise RunError(f"{self.uri}/{prefix}/{name}: its manifest names this file, but it is gone") from None
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _published(self, prefix: str, entries: Mapping[str, StoredFile]) -> dict[str, Any] | None:
        """The manifest under this prefix if it names just these files, None if there is no manifest."""
        manifest = self.read_json(f"{prefix}/{MANIFEST}")
        if manifest is None:
            return None
        if self._stored_files(prefix, manifest) != entries:
            raise AlreadyPublished(f"{self.uri}/{prefix}: other files are published here already, and they stay")
        return manifest

    def _stored_files(self, prefix: str, manifest: Mapping[str, Any]) -> dict[str, StoredFile]:
        try:
            files = {str(name): StoredFile(int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
            for name in files:
                _check_name(name)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):
            raise RunError(f"{self.uri}/{prefix}/{MANIFEST}: damaged, it does not list files") from None
        return files


def tree_files(local: Path) -> dict[str, Path]:
    """Every file below a folder by its relative name; links to files are followed, links to folders refused."""
    if not local.is_dir():
        raise RunError(f"{local}: is not a folder")
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(local):
        for name in folders:
            if Path(folder, name).is_symlink():
                raise UserError(f"{Path(folder, name)}: is a link to a folder, which cannot be published")
        for name in names:
            path = Path(folder, name)
            files[path.relative_to(local).as_posix()] = path
    return files


def _check_name(name: str) -> None:
    """A relative path that stays below its tree; a manifest from elsewhere must not write outside of it."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise UserError(f"{name!r}: not a relative file name")


def _describe(path: Path) -> StoredFile:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
        return StoredFile(handle.tell(), digest.hexdigest())


def _encode(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
