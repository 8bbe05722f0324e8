"""Checkpoints as a reader of the storage sees them; torch is not needed to list or verify one.

Under ``<run>/checkpoints/step-<step>-<attempt token>/`` lie the shard files, one ``rank-N.json``
per rank that names its files, and last of all ``manifest.json``, written by one conditional put.
Promises: what has no manifest, or lacks a file that the manifest names, is incomplete and never
loaded; the newest checkpoint is that of the highest step among the complete ones, whatever names
and clocks say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ebbtide.platform import config as job_file
from ebbtide.platform.checksums import sha256, sha256_of_file, sha256_of_stored
from ebbtide.platform.config import Config
from ebbtide.platform.errors import AlreadyExists, CheckpointError, NotFound
from ebbtide.platform.storage import ObjectInfo, Storage
from ebbtide.train.config import TrainConfig

MANIFEST = "manifest.json"
TRAIN_CONFIG = "train.yaml"
MODEL_CONFIG = "config.json"
EVENTS = "events.jsonl"

FOLDER = "checkpoints"
PIN = "pinned"
_NAME = re.compile(rf"{FOLDER}/(step-(\d+)-[0-9a-f]+)/(.+)")


class FileEntry(Config):
    """One file of a checkpoint, by its key under the checkpoint's own root."""

    key: str
    size_bytes: int
    sha256: str


class CheckpointManifest(Config):
    """What makes a checkpoint complete; written last.

    ``step`` is the number of finished steps, ``loss`` the training loss of the last of them.
    ``fingerprint`` holds what the bits of a training step depend on beside the state. ``checksum``
    is of the manifest itself, without it; None in those of earlier versions.
    """

    format_version: Literal[1] = 1
    run: str
    step: int
    time_s: float
    world_size: int
    config_sha256: str
    dataset_sha256: str
    tokens_seen: int
    loss: float | None = None
    validation_loss: float | None = None
    fingerprint: dict[str, str]
    files: tuple[FileEntry, ...]
    checksum: str | None = None

    @property
    def right_checksum(self) -> str:
        """What ``checksum`` has to be."""
        return sha256(self.model_copy(update={"checksum": None}).model_dump_json().encode())

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(file.size_bytes for file in self.files)


State = Literal["complete", "incomplete", "corrupt"]


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a listing; ``problem`` says why it is not complete.

    ``is_pinned``: a person wants it kept. ``is_committed``: it has a manifest. ``written_s`` is
    when it was last written to, by the storage's clock.
    """

    step: int
    uri: str
    state: State
    size_bytes: int
    time_s: float
    validation_loss: float | None = None
    problem: str | None = None
    is_pinned: bool = False
    is_committed: bool = field(default=True, compare=False)
    written_s: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        """The checkpoint's folder, such as ``step-00000050-1f0c22ab``."""
        return self.uri.rstrip("/").rpartition("/")[2]


def checkpoint_key(step: int, token: str) -> str:
    """The key prefix of a checkpoint under its run; ``token`` is the writing attempt's own."""
    return f"{FOLDER}/step-{step:08d}-{token}"


def describe_file(key: str, path: Path) -> FileEntry:
    """The entry of a local file that is to be, or was, stored under ``key``."""
    return FileEntry(key=key, size_bytes=path.stat().st_size, sha256=sha256_of_file(path))


def read_manifest(checkpoint: Storage) -> CheckpointManifest:
    """The manifest under a checkpoint's root. Raises NotFound, or CheckpointError if damaged."""
    data = checkpoint.get(MANIFEST)
    try:
        manifest = CheckpointManifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the file"
        raise CheckpointError(
            f"{checkpoint.uri}/{MANIFEST} is damaged ({where}: {fault['msg']}); "
            "use another checkpoint"
        ) from error
    if manifest.checksum not in (None, manifest.right_checksum):
        raise CheckpointError(
            f"{checkpoint.uri}/{MANIFEST} is damaged (it does not have its own checksum); "
            "use another checkpoint"
        )
    return manifest


def read_train_config(checkpoint: Storage, manifest: CheckpointManifest) -> TrainConfig:
    """The job file with which a checkpoint was made. Raises CheckpointError if it is damaged."""
    data = checkpoint.get(TRAIN_CONFIG)
    if sha256(data) != manifest.config_sha256:
        raise CheckpointError(f"{checkpoint.uri}/{wrong_checksum(TRAIN_CONFIG)}")
    return job_file.parse(data.decode(), TrainConfig, f"{checkpoint.uri}/{TRAIN_CONFIG}")


def list_checkpoints(run: Storage) -> list[CheckpointInfo]:
    """Every checkpoint under a run's root, highest step first; checks sizes, reads no contents."""
    found: dict[str, list[ObjectInfo]] = {}
    for info in run.list(f"{FOLDER}/"):
        if match := _NAME.fullmatch(info.key):
            found.setdefault(match[1], []).append(info)
    infos = [_inspect(run, name, objects) for name, objects in found.items()]
    return sorted(infos, key=lambda info: (info.step, info.state == "complete"), reverse=True)


def name_of_key(key: str) -> str | None:
    """The name of the checkpoint that a key under a run's root belongs to, if any."""
    match = _NAME.fullmatch(key)
    return match[1] if match else None


def newest(run: Storage) -> CheckpointInfo | None:
    """The complete checkpoint of the highest step, or None."""
    return next((info for info in list_checkpoints(run) if info.state == "complete"), None)


def _inspect(run: Storage, name: str, objects: Sequence[ObjectInfo]) -> CheckpointInfo:
    prefix = f"{FOLDER}/{name}"
    sizes = {info.key.removeprefix(f"{prefix}/"): info.size_bytes for info in objects}
    written_s = max(info.modified_s for info in objects)
    seen = CheckpointInfo(
        step=int(name.split("-")[1]),
        uri=f"{run.uri}/{prefix}",
        state="incomplete",
        size_bytes=sum(sizes.values()),
        time_s=written_s,
        problem=f"has no {MANIFEST}",
        is_pinned=PIN in sizes,
        is_committed=MANIFEST in sizes,
        written_s=written_s,
    )
    if MANIFEST not in sizes:
        return seen
    try:
        manifest = read_manifest(run.child(prefix))
    except NotFound:  # deleted since the listing
        return seen
    except CheckpointError as error:
        return replace(seen, state="corrupt", problem=str(error))
    state, problem = _compare(manifest.files, sizes)
    return replace(
        seen,
        step=manifest.step,
        state=state,
        size_bytes=manifest.size_bytes,
        time_s=manifest.time_s,
        validation_loss=manifest.validation_loss,
        problem=problem,
    )


def _compare(files: Iterable[FileEntry], sizes: Mapping[str, int]) -> tuple[State, str | None]:
    for file in files:
        if file.key not in sizes:
            return "incomplete", f"{file.key} is missing"
        if sizes[file.key] != file.size_bytes:
            return "corrupt", f"{file.key} has {sizes[file.key]} bytes instead of {file.size_bytes}"
    return "complete", None


def verify(run: Storage, info: CheckpointInfo) -> CheckpointInfo:
    """Read every byte of a complete checkpoint and compare it with the manifest's checksums."""
    if info.state != "complete":
        return info
    checkpoint = run.child(f"{FOLDER}/{info.name}")
    try:
        for file in read_manifest(checkpoint).files:
            if sha256_of_stored(checkpoint, file.key, file.size_bytes) != file.sha256:
                return replace(info, state="corrupt", problem=wrong_checksum(file.key))
    except NotFound as error:
        return replace(info, state="incomplete", problem=str(error))
    except CheckpointError as error:
        return replace(info, state="corrupt", problem=str(error))
    return info


def wrong_checksum(key: str) -> str:
    """How a file that is not what the manifest says is named, wherever it is noticed."""
    return f"{key} does not have the checksum of the manifest"


_PARTS = TypeAdapter(tuple[FileEntry, ...])


def put_part(checkpoint: Storage, rank: int, files: Sequence[FileEntry]) -> None:
    """Say that a rank has stored its files; the rank's last write before the commit."""
    checkpoint.put(f"rank-{rank}.json", json.dumps([file.model_dump() for file in files]).encode())


def commit(checkpoint: Storage, manifest: CheckpointManifest) -> CheckpointManifest:
    """Make a checkpoint exist: gather every rank's part and put the manifest, once.

    Raises CheckpointError if a part is missing, AlreadyExists if another has been committed there.
    One that is there already and the same is ours: its answer was lost, and the put was repeated.
    """
    files = list(manifest.files)
    for rank in range(manifest.world_size):
        try:
            files.extend(_PARTS.validate_json(checkpoint.get(f"rank-{rank}.json")))
        except NotFound as error:
            raise CheckpointError(
                f"{checkpoint.uri}: rank {rank} has not stored its part; the save is not committed"
            ) from error
    whole = manifest.model_copy(update={"files": tuple(files)})
    whole = whole.model_copy(update={"checksum": whole.right_checksum})
    data = whole.model_dump_json().encode()
    try:
        checkpoint.put(MANIFEST, data, if_absent=True)
    except AlreadyExists:
        if checkpoint.get(MANIFEST) != data:
            raise
    return whole
