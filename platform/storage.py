"""Objects under a URI: one Protocol for a local directory and for S3.

Promises: a ``put`` is atomic (a reader sees the whole object or none), ``if_absent`` lets exactly
one of several writers win, and every foreign error arrives as a :class:`StorageError` that names
the URI. Keys are relative, ``/``-separated and never leave the storage's root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote

from ebbtide.platform.errors import AccessError, AlreadyExists, ConfigError, NotFound, StorageError


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a listing: its key, size in bytes, and when it was written (epoch seconds)."""

    key: str
    size_bytes: int
    modified_s: float


Listing = list[ObjectInfo]


@dataclass(frozen=True)
class Upload:
    """An upload that was begun (epoch seconds) and is not finished; no reader sees it.

    It is at work, or what a killed process has left. ``id`` tells uploads of one key apart.
    """

    key: str
    begun_s: float
    id: str


Uploads = list[Upload]


class Storage(Protocol):
    """Objects under one root URI. Safe to share between threads."""

    @property
    def uri(self) -> str:
        """The root, without a trailing slash."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write an object whole. With ``if_absent`` raises AlreadyExists if the key is taken."""

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a local file (S3: in parallel parts, invisible until complete)."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotFound."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; shorter at the object's end. Raises NotFound."""

    def get_file(self, key: str, path: Path) -> None:
        """The object into a local file, which appears only when it is whole. Raises NotFound."""

    def size(self, key: str) -> int:
        """Bytes of an object. Raises NotFound."""

    def list(self, prefix: str = "") -> Listing:
        """Every object whose key starts with ``prefix``, sorted by key."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def uploads(self, prefix: str = "") -> Uploads:
        """Every unfinished upload whose key starts with ``prefix``."""

    def abort(self, upload: Upload) -> None:
        """Drop an unfinished upload and its bytes; one that is over meanwhile is no error."""

    def child(self, prefix: str) -> Storage:
        """The storage whose root is ``prefix`` under this one."""


def check_key(key: str) -> str:
    """A key as it came, or StorageError if it could leave the root."""
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or key.endswith("/"):
        raise StorageError(f"{key!r} is not an object key; write a relative path without '..'")
    return key


def open_storage(uri: str) -> Storage:
    """The storage of a URI: ``s3://bucket/prefix``, ``file:///path`` or a plain local path.

    S3's endpoint, region and credentials come from the standard AWS variables and files.
    Raises ConfigError for any other scheme. Nothing is contacted or created yet.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == uri:
        if uri.startswith(("s3:", "file:")):
            raise ConfigError(f"{uri}: write s3://bucket/prefix, file:///path or a path")
        return _local(uri, uri)
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(f"{uri}: a file URI has no host; write file:///absolute/path")
        return _local(unquote(f"/{path}"), uri)
    if scheme == "s3":
        from ebbtide.platform.s3 import S3Storage

        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError(f"{uri}: no bucket; write s3://bucket/prefix")
        return S3Storage(bucket, prefix.strip("/"))
    raise ConfigError(f"{uri}: scheme {scheme!r} is not known; write file://, s3:// or a path")


def _local(path: str, uri: str) -> LocalStorage:
    if "\0" in path:
        raise ConfigError(f"{uri!r}: a path has no zero byte")
    try:
        return LocalStorage(Path(path))
    except RuntimeError as error:  # of pathlib, for ~NAME
        raise ConfigError(f"{uri}: there is no such user here; write the path out") from error


def join(uri: str, *parts: str) -> str:
    """A URI (or path) with more path parts."""
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts)])


def probe(storage: Storage) -> None:
    """Write, read and delete one small object, so that a wrong set-up is said at once.

    Raises AccessError or StorageError with what to do.
    """
    key, text = f".probe-{os.getpid()}-{os.urandom(4).hex()}", b"ebbtide"
    storage.put(key, text)
    try:
        if storage.get(key) != text:
            raise StorageError(f"{storage.uri}: an object was read back differently than written")
    finally:
        storage.delete(key)


_STAGED = ".staged-"


class LocalStorage:
    """Objects as files under a directory, which is created at the first put."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root.expanduser()))

    @property
    def uri(self) -> str:
        return str(self._root)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self._root}: cannot {what}: not there") from error
        except PermissionError as error:
            raise AccessError(f"{self._root}: cannot {what}: permission denied") from error
        except OSError as error:
            raise StorageError(f"{self._root}: cannot {what}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _staged(self, target: Path) -> Iterator[Path]:
        """A temporary file beside ``target`` that is gone afterwards, whatever happens."""
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_STAGED, dir=target.parent)
        os.close(handle)
        staged = Path(name)
        try:
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def _publish(self, staged: Path, target: Path, if_absent: bool) -> None:
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.chmod(0o644)
        if if_absent:
            try:
                os.link(staged, target)
            except FileExistsError as error:
                raise AlreadyExists(f"{target}: exists already") from error
        else:
            os.replace(staged, target)
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        target = self._path(key)
        with self._mapped(f"write {key}"), self._staged(target) as staged:
            staged.write_bytes(data)
            self._publish(staged, target, if_absent)

    def put_file(self, key: str, path: Path) -> None:
        target = self._path(key)
        with self._mapped(f"write {key}"), self._staged(target) as staged:
            shutil.copyfile(path, staged)
            self._publish(staged, target, if_absent=False)

    def get(self, key: str) -> bytes:
        with self._mapped(f"read {key}"):
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._mapped(f"read {key}"), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def get_file(self, key: str, path: Path) -> None:
        with self._mapped(f"read {key}"):
            source = self._path(key)
            with self._staged(path) as staged:
                shutil.copyfile(source, staged)
                os.replace(staged, path)

    def size(self, key: str) -> int:
        with self._mapped(f"read {key}"):
            return self._path(key).stat().st_size

    def list(self, prefix: str = "") -> Listing:
        return [info for info, is_staged in self._files(prefix) if not is_staged]

    def uploads(self, prefix: str = "") -> Uploads:
        staged = [info for info, is_staged in self._files(prefix) if is_staged]
        return [Upload(info.key, info.modified_s, info.key) for info in staged]

    def abort(self, upload: Upload) -> None:
        self.delete(upload.id)

    def _files(self, prefix: str) -> Sequence[tuple[ObjectInfo, bool]]:
        """Every file of a key with that prefix, sorted by key, and whether it is a staged one."""
        found = []
        with self._mapped("list"):
            for folder, _, names in os.walk(self._root):
                for name in names:
                    path = Path(folder, name)
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix):
                        with contextlib.suppress(FileNotFoundError):  # deleted since the walk
                            stat = path.stat()
                            info = ObjectInfo(key, stat.st_size, stat.st_mtime)
                            found.append((info, name.startswith(_STAGED)))
        return sorted(found, key=lambda each: each[0].key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._mapped(f"delete {key}"):
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self._root or not parent.is_relative_to(self._root):
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty: others still live there
                    break

    def child(self, prefix: str) -> LocalStorage:
        return LocalStorage(self._path(prefix))
