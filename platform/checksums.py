"""SHA-256 of bytes, files and stored objects, in hexadecimal: the checksum of every manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ebbtide.platform.storage import Storage

_CHUNK_BYTES = 16 * 2**20


def sha256(data: bytes | memoryview) -> str:
    """Of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Of a local file, which is not held in memory. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_stored(storage: Storage, key: str, size_bytes: int) -> str:
    """Of the first ``size_bytes`` of an object, read in pieces of 16 MiB. Raises StorageError."""
    checksum = hashlib.sha256()
    for start in range(0, size_bytes, _CHUNK_BYTES):
        checksum.update(storage.get_range(key, start, min(_CHUNK_BYTES, size_bytes - start)))
    return checksum.hexdigest()
