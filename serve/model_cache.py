"""The copies of models that this machine keeps: of remote ones, and in fewer bits.

Promises: a copy that a process uses stays until that process ends, however it ends, or gives it
back; of the others those that were used last stay, as long as all copies take a quarter of their
disk at most, and a twentieth of it is free (two that are made at once do not know of each other).
What else lies there is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_LARGEST_PART = 1 / 4
_FREE_PART = 1 / 20
_LOCK, _USE = ".lock", ".use"
_NAME = re.compile(r"[0-9a-f]{32}(-\w+)?")
"""Of a copy: a digest of what it holds."""

_used: dict[Path, IO[str]] = {}
"""Of this process: by copy, the file whose lock says that it is used."""


@dataclass(frozen=True)
class Copy:
    """One that may go, if nobody uses it."""

    folder: Path
    size_bytes: int
    used_s: float


def cache_root() -> Path:
    """Where copies of models are kept on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "ebbtide", "models")


@contextlib.contextmanager
def locked(copy: Path) -> Iterator[None]:
    """One process of this machine at a time makes or removes a copy, which is used by the caller
    until its process ends. Raises OSError."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _opened(_beside(copy, _LOCK), fcntl.LOCK_EX):
        if copy not in _used:
            _used[copy] = _open_locked(_beside(copy, _USE), fcntl.LOCK_SH)
        os.utime(_used[copy].fileno())
        yield


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """The copies that come into use inside are given back afterwards."""
    before = set(_used)
    try:
        yield
    finally:
        for copy in _used.keys() - before:
            give_back(copy)


def give_back(copy: Path) -> None:
    """This process uses the copy no longer, if it has."""
    if copy in _used:
        _used.pop(copy).close()


def make_room(cache: Path, needed_bytes: int) -> None:
    """Remove copies that nobody uses, so that one of this size can be made. Raises OSError."""
    disk, copies = shutil.disk_usage(cache), _copies(cache)
    taken = sum(each.size_bytes for each in copies) + needed_bytes
    excess = max(
        taken - disk.total * _LARGEST_PART, needed_bytes + disk.total * _FREE_PART - disk.free
    )
    for copy in sorted(copies, key=lambda each: each.used_s):
        if excess <= 0:
            return
        if _remove(copy.folder):
            log.info("%s: removed, as nobody has used that copy of a model for long", copy.folder)
            excess -= copy.size_bytes


def _copies(cache: Path) -> Sequence[Copy]:
    found = []
    for folder in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it just now
            if _NAME.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                use = _beside(folder, _USE)
                used_s = (use if use.exists() else folder).stat().st_mtime
                found.append(Copy(folder, size, used_s))
    return found


def _remove(folder: Path) -> bool:
    """Remove a copy, unless it is used or being made, or cannot be removed."""
    lock, use = _beside(folder, _LOCK), _beside(folder, _USE)
    try:
        with (
            _opened(lock, fcntl.LOCK_EX | fcntl.LOCK_NB),
            _opened(use, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            shutil.rmtree(folder)
            use.unlink()
            lock.unlink()
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s: this copy of a model could not be removed: %s", folder, error)
        return False
    return True


def _beside(copy: Path, suffix: str) -> Path:
    return copy.with_name(copy.name + suffix)


@contextlib.contextmanager
def _opened(path: Path, how: int) -> Iterator[None]:
    with _open_locked(path, how):
        yield


def _open_locked(path: Path, how: int) -> IO[str]:
    """A file with its lock; one that was removed in the meantime says nothing. Raises OSError."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, how)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
