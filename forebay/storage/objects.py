"""Where bytes lie: a local folder or an S3 bucket, behind six operations.

Invariants:
- `create` writes an object only if there is none, and exactly one of several racing writers succeeds.
- `create` and `replace` are atomic: a reader sees the old bytes, the new bytes or nothing, never a part.
- What `upload`, `create` or `replace` returned for is durable.
- Credentials come from the environment and are held by the S3 client alone: never in a field, a message or a log.

Errors are `UserError` (wrong bucket, credentials, permissions) and `RunError` (endpoint away, disk full), in one line.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from forebay.errors import RunError, UserError

_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 15
_ATTEMPTS = 2
# S3 codes that mean "an object of this name is there already". AWS answers 409 while another conditional put runs.
_EXISTS_CODES = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}


class ObjectExistsError(RunError):
    """`create` found an object of that name."""


class Objects(Protocol):
    """A flat set of objects; keys are relative, with `/` between their parts."""

    def upload(self, source: Path, key: str) -> None:
        """Copy a local file, whatever lay there before; not atomic."""

    def download(self, key: str, target: Path) -> None:
        """Copy an object to a local file; raises `FileNotFoundError`."""

    def create(self, key: str, data: bytes) -> None:
        """Write a small object unless there is one; raises `ObjectExistsError`."""

    def replace(self, key: str, data: bytes) -> None:
        """Write a small object, atomically."""

    def read(self, key: str) -> bytes | None:
        """The bytes of a small object; None if there is none."""

    def size(self, key: str) -> int:
        """Bytes of an object; raises `FileNotFoundError`."""

    def list_keys(self) -> list[str]:
        """All keys, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object."""


def open_objects(uri: str, endpoint_url: str | None = None) -> Objects:
    """Objects under `file://DIR` (relative to the working directory) or `s3://BUCKET/PREFIX`; contacts nobody yet."""
    for text in (uri, endpoint_url or ""):
        if "@" in urlsplit(text).netloc:
            raise UserError("storage: no credentials in a URI; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in ("file", "s3") or not rest.strip("/"):
        raise UserError(f"storage.uri {uri}: write file://DIR or s3://BUCKET/PREFIX")
    if scheme == "file":
        return LocalObjects(Path(rest))
    return S3Objects(rest.strip("/"), endpoint_url)


class LocalObjects:
    """Objects as files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def upload(self, source: Path, key: str) -> None:
        with _local_errors(self._root):
            target = self._place(key)
            shutil.copyfile(source, target)
            _sync(target)

    def download(self, key: str, target: Path) -> None:
        with _local_errors(self._root):
            shutil.copyfile(self._root / key, target)

    def create(self, key: str, data: bytes) -> None:
        with _local_errors(self._root):
            target = self._place(key)
            staged = self._stage(target, data)
            try:
                os.link(staged, target)
            except FileExistsError:
                raise ObjectExistsError(f"{target}: exists already") from None
            finally:
                staged.unlink()
            _sync(target.parent)

    def replace(self, key: str, data: bytes) -> None:
        with _local_errors(self._root):
            target = self._place(key)
            os.replace(self._stage(target, data), target)
            _sync(target.parent)

    def read(self, key: str) -> bytes | None:
        with _local_errors(self._root):
            try:
                return (self._root / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def size(self, key: str) -> int:
        with _local_errors(self._root):
            return (self._root / key).stat().st_size

    def list_keys(self) -> list[str]:
        with _local_errors(self._root):
            walk = os.walk(self._root, onerror=_raise_unless_missing)
            found = (Path(folder, name) for folder, _, names in walk for name in names)
            return sorted(path.relative_to(self._root).as_posix() for path in found)

    def delete(self, key: str) -> None:
        with _local_errors(self._root):
            (self._root / key).unlink()

    def _place(self, key: str) -> Path:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _stage(self, target: Path, data: bytes) -> Path:
        """The bytes, durable, under a name nobody reads, in the folder of `target`."""
        staged = target.parent / f".{uuid.uuid4().hex}.partial"
        try:
            staged.write_bytes(data)
            _sync(staged)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        return staged


class S3Objects:
    """Objects of one bucket, under one prefix, through s3fs."""

    def __init__(self, root: str, endpoint_url: str | None) -> None:
        import s3fs  # here, so that a local store does not load the S3 client (0.5 s)

        self._root = root
        self._where = f"s3://{root}" + (f" at {endpoint_url}" if endpoint_url else "")
        client: dict[str, str] = {}
        config: dict[str, Any] = {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "retries": {"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        }
        if endpoint_url:
            # Servers that are not AWS seldom do bucket.host names, and ignore the region, but the signature needs one.
            config["s3"] = {"addressing_style": "path"}
            client["region_name"] = os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        # skip_instance_cache: s3fs would hand out an older client, with older credentials.
        self._fs: Any = s3fs.S3FileSystem(
            endpoint_url=endpoint_url,
            client_kwargs=client,
            config_kwargs=config,
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._fs.retries = _ATTEMPTS

    def upload(self, source: Path, key: str) -> None:
        with self._errors():
            self._fs.put_file(str(source), self._path(key))

    def download(self, key: str, target: Path) -> None:
        with self._errors():
            self._fs.get_file(self._path(key), str(target))

    def create(self, key: str, data: bytes) -> None:
        with self._errors():
            try:
                self._fs.pipe_file(self._path(key), data, mode="create")
            except OSError as error:
                # AWS's answer becomes FileExistsError, SeaweedFS's an EINVAL: only the code below tells.
                if isinstance(error, FileExistsError) or _s3_code(error) in _EXISTS_CODES:
                    raise ObjectExistsError(f"s3://{self._path(key)}: exists already") from None
                raise

    def replace(self, key: str, data: bytes) -> None:
        with self._errors():
            self._fs.pipe_file(self._path(key), data)

    def read(self, key: str) -> bytes | None:
        with self._errors():
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError as error:
                if _s3_code(error) == "NoSuchBucket":
                    raise
                return None

    def size(self, key: str) -> int:
        with self._errors():
            return int(self._fs.info(self._path(key))["size"])

    def list_keys(self) -> list[str]:
        with self._errors():
            found: list[str] = self._fs.find(self._root)
            return sorted(path.removeprefix(self._root + "/") for path in found)

    def delete(self, key: str) -> None:
        with self._errors():
            self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what s3fs and botocore raise into one line. Server texts stay out: they may quote the request."""
        from botocore import exceptions as boto

        try:
            yield
        except (boto.NoCredentialsError, boto.PartialCredentialsError):
            raise UserError(
                f"{self._where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            ) from None
        except boto.InvalidRegionError:
            raise UserError(f"{self._where}: AWS_DEFAULT_REGION is not a region") from None
        except boto.BotoCoreError as error:
            raise RunError(
                f"{self._where}: the object store cannot be reached ({type(error).__name__}); "
                "is it running, and is storage.endpoint_url right?"
            ) from None
        except TimeoutError:
            raise RunError(f"{self._where}: the object store does not answer in time") from None
        except PermissionError as error:
            raise UserError(f"{self._where}: {_refusal(error)}") from None
        except FileNotFoundError as error:
            if _s3_code(error) == "NoSuchBucket":
                raise UserError(f"{self._where}: there is no such bucket; create it or correct storage.uri") from None
            raise
        except OSError as error:
            code = _s3_code(error)
            if code is None:  # a local file: the source or the target of a copy
                raise _explain(error, Path(str(error.filename or "."))) from None
            raise RunError(f"{self._where}: the object store refused the request ({code})") from None


def _refusal(error: PermissionError) -> str:
    code = _s3_code(error)
    if code is None:
        return f"permission denied on the local file {error.filename}"
    return f"access is refused ({code}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy"


def _s3_code(error: BaseException) -> str | None:
    """The error code in the server's answer behind an exception of s3fs, if that is what lies behind it."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    return str(response.get("Error", {}).get("Code", "unknown"))


@contextmanager
def _local_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _explain(error, root) from None


def _explain(error: OSError, root: Path) -> RunError | UserError:
    place = error.filename2 or error.filename or root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{root}: no space left; free some or set storage.uri to another disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"{place}: permission denied; choose a storage.uri that you may write to")
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return UserError(f"{place}: a file lies where a folder should be, or a folder where a file should be")
    return RunError(f"{place}: {error.strerror or error}")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # no folder: nothing was stored yet
        raise error


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
