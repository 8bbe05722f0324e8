"""What an exported model directory holds: the contract between training and serving.

``ebbtide export`` writes ``ebbtide.json`` last, so a directory that has one is whole. Its checksums
cover every other file; serving verifies them before an engine reads a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ebbtide.platform.checksums import sha256_of_file
from ebbtide.platform.config import Config
from ebbtide.platform.errors import NotFound, StorageError
from ebbtide.platform.storage import Storage

MANIFEST = "ebbtide.json"

Dtype = Literal["fp32", "bf16"]
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ExportedFile(Config):
    """One file of the directory, by its key under the directory's root."""

    key: str
    size_bytes: Count
    sha256: Sha256


class ExportManifest(Config):
    """Where the weights come from, and every file beside the manifest."""

    format_version: Literal[1] = 1
    run: str
    step: Count
    dataset_sha256: Sha256
    dtype: Dtype
    parameters: Count
    files: tuple[ExportedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(file.size_bytes for file in self.files)


def describe(folder: Path, keys: Iterable[str]) -> tuple[ExportedFile, ...]:
    """The entries of local files, sorted by key."""
    return tuple(
        ExportedFile(
            key=key, size_bytes=(folder / key).stat().st_size, sha256=sha256_of_file(folder / key)
        )
        for key in sorted(keys)
    )


def to_bytes(manifest: ExportManifest) -> bytes:
    """The manifest as it is stored."""
    return manifest.model_dump_json(indent=2).encode() + b"\n"


def read(storage: Storage) -> ExportManifest | None:
    """The manifest of a directory, None if it has none. Raises StorageError if it is damaged."""
    try:
        data = storage.get(MANIFEST)
    except NotFound:
        return None
    try:
        return ExportManifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the file"
        raise StorageError(
            f"{storage.uri}/{MANIFEST} is damaged ({where}: {fault['msg']}); export the model again"
        ) from error


def damage(folder: Path, manifest: ExportManifest) -> str | None:
    """What is wrong with a local copy, naming the first bad file; None if every byte is right."""
    for file in manifest.files:
        path = folder / file.key
        if not path.is_file():
            return f"{file.key} is missing"
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{file.key} has {size_bytes} bytes instead of {file.size_bytes}"
        if sha256_of_file(path) != file.sha256:
            return f"{file.key} does not have the checksum of the manifest"
    return None
