"""Which files a list of sources names, in an order that depends on their names alone.

A source is a file, a directory, a glob pattern, or an ``s3://`` object or prefix. Directories are
searched to any depth in name order, leaving out what begins with a dot; loops of symbolic links
end, and a file that is reached twice is taken once. Nothing is read here.

Patterns: ``*`` and ``?`` stay within a name, ``**/`` spans directories, and a pattern without a
slash meets a name at any depth. An excluded directory is not entered.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ebbtide.platform.errors import ConfigError, DataError, NotFound
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import Storage, open_storage

Kind = Literal["text", "jsonl", "json", "parquet"]
Compression = Literal["gzip", "zstd"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class SourceFile:
    """One file to read; ``name`` is how messages call it."""

    name: str
    storage: Storage | None = None  # None: a local file of that name
    key: str = ""

    @property
    def compression(self) -> Compression | None:
        """By the name's last suffix."""
        return _COMPRESSIONS.get(os.path.splitext(self.name)[1].lower())

    @property
    def kind(self) -> Kind:
        """By the name's suffix before any compression; whatever is not known is text."""
        stem, suffix = os.path.splitext(self.name)
        if suffix.lower() in _COMPRESSIONS:
            suffix = os.path.splitext(stem)[1]
        return _KINDS.get(suffix.lower(), "text")

    @contextlib.contextmanager
    def local(self) -> Iterator[Path]:
        """The file on this machine; one of S3 is there only inside the ``with``."""
        if self.storage is None:
            yield Path(self.name)
            return
        with scratch_folder("source") as folder:
            path = folder / "source"
            self.storage.get_file(self.key, path)
            yield path


@dataclass(frozen=True)
class Filter:
    """Which paths under a directory are wanted: one of ``globs`` (none: all), no ``excludes``."""

    globs: Sequence[str] = ()
    excludes: Sequence[str] = ()

    def enters(self, path: str) -> bool:
        """Whether a directory or file at this relative path is neither hidden nor excluded."""
        return not path.rpartition("/")[2].startswith(".") and not any(
            matches(pattern, path) for pattern in self.excludes
        )

    def takes(self, path: str) -> bool:
        """Whether a file that may be entered is wanted."""
        return not self.globs or any(matches(pattern, path) for pattern in self.globs)


def matches(pattern: str, path: str) -> bool:
    """Whether a ``/``-separated relative path meets a pattern (see the module's docstring)."""
    pattern = pattern.rstrip("/")
    parts = pattern.removeprefix("./").split("/") if "/" in pattern else ["**", pattern]
    return _meets(parts, path.split("/"))


def _meets(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_meets(parts[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _meets(parts[1:], names[1:])


def find_sources(
    sources: Sequence[str], wanted: Filter = Filter(), without: Path | None = None
) -> list[SourceFile]:
    """The files of all sources, source by source, each in name order.

    ``without`` is a local directory that is never entered (the output). Raises DataError for a
    source that is missing or closed, or in which no file is wanted; ConfigError for one that is
    empty or of a scheme that is not known.
    """
    found: dict[str, SourceFile] = {}
    for source in sources:
        if not source:
            raise ConfigError("a source is empty: name a file, a directory or an s3:// URI")
        if source.startswith("s3://"):
            files = list(_s3(source, wanted))
        else:
            files = list(_local(source, wanted, without))
        if not files:
            raise DataError(
                f"{source}: holds no file that is wanted "
                f"(globs: {', '.join(wanted.globs) or 'all'}; "
                f"excluded: {', '.join(wanted.excludes) or 'none'})"
            )
        for identity, file in files:
            found.setdefault(identity, file)
    return list(found.values())


def _split_magic(source: str) -> tuple[str, str]:
    """A glob pattern as the directory before its first wildcard, and the pattern below that."""
    parts = source.split("/")
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    base = "/".join(parts[:first]) or ("/" if source.startswith("/") else "")
    return base, "./" + "/".join(parts[first:])


def _local(source: str, wanted: Filter, without: Path | None) -> Iterator[tuple[str, SourceFile]]:
    is_uri = "://" in source  # of a file, or of a scheme that is refused
    path = open_storage(source).uri if is_uri else os.path.expanduser(source)
    if os.path.isfile(path):
        yield os.path.realpath(path), SourceFile(path)
        return
    if not os.path.isdir(path):
        if os.path.exists(path):
            raise DataError(f"{source}: is neither a file nor a directory")
        if not _MAGIC.search(path):
            raise DataError(f"{source}: is not there, or its directory may not be read")
        base, pattern = _split_magic(path)
        path, wanted = base or ".", Filter((pattern,), wanted.excludes)
        if not os.path.isdir(path):
            raise DataError(f"{source}: there is no directory {path}")
    avoid = {os.path.realpath(without)} if without else set()
    for relative in _walk(Path(path), "", wanted, avoid):
        file = os.path.join(path, relative)
        yield os.path.realpath(file), SourceFile(file)


def _walk(root: Path, relative: str, wanted: Filter, seen: set[str]) -> Iterator[str]:
    """Relative paths of the wanted files below ``root / relative``; ``seen`` ends link loops."""
    real = os.path.realpath(root / relative)
    if real in seen:
        return
    seen.add(real)
    try:
        names = sorted(os.listdir(root / relative))
    except OSError as error:
        raise DataError(f"{root / relative}: cannot be listed: {error.strerror}") from error
    for name in names:
        below = f"{relative}/{name}" if relative else name
        if not wanted.enters(below):
            continue
        if os.path.isdir(root / below):
            yield from _walk(root, below, wanted, seen)
        elif os.path.isfile(root / below) and wanted.takes(below):
            yield below


def _s3(source: str, wanted: Filter) -> Iterator[tuple[str, SourceFile]]:
    if _MAGIC.search(source):
        base, pattern = _split_magic(source)
        wanted = Filter((pattern,), wanted.excludes)
    else:
        base = source.rstrip("/")
        parent, _, name = base.rpartition("/")
        if not source.endswith("/") and parent != "s3:/":
            with contextlib.suppress(NotFound):
                storage = open_storage(parent)
                storage.size(name)
                yield base, SourceFile(base, storage, name)
                return
    storage = open_storage(base)
    objects = [info for info in storage.list() if not info.key.endswith("/")]
    if not objects:
        raise DataError(f"{source}: is not there")
    for info in objects:
        folders = info.key.split("/")
        paths = ["/".join(folders[: depth + 1]) for depth in range(len(folders))]
        if all(wanted.enters(path) for path in paths) and wanted.takes(info.key):
            yield f"{base}/{info.key}", SourceFile(f"{base}/{info.key}", storage, info.key)
