"""Checkpoints by their URI, or a run's: read and verified in this process alone, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import CheckpointError, NotFound
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.train import dcp, manifest
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import CheckpointManifest, newest

T = TypeVar("T")

MODEL = "model."
"""What the names of the model's tensors begin with in a checkpoint."""


def from_newest(uri: str, read: Callable[[str], T]) -> T:
    """``read`` the checkpoint of that URI or, if it is a run's, its newest one.

    A run at work removes old checkpoints: where a newer one was committed while one was read in
    vain, that is read.
    """
    run = open_storage(uri)
    found = newest(run)
    source = uri if found is None else found.uri
    while True:
        try:
            return read(source)
        except (CheckpointError, NotFound):
            found = newest(run)
            if found is None or found.uri == source:
                raise
            source = found.uri


def read_train_config(checkpoint_uri: str) -> TrainConfig:
    """The job file of a checkpoint; a run's URI means its newest checkpoint."""
    checkpoint = _open(checkpoint_uri)
    return manifest.read_train_config(checkpoint, manifest.read_manifest(checkpoint))


def read_model_config(checkpoint_uri: str) -> str | None:
    """The model's ``config.json``; None if it is not a model of transformers."""
    checkpoint = _open(checkpoint_uri)
    entries = {file.key: file for file in manifest.read_manifest(checkpoint).files}
    if manifest.MODEL_CONFIG not in entries:
        return None
    data = checkpoint.get(manifest.MODEL_CONFIG)
    if sha256(data) != entries[manifest.MODEL_CONFIG].sha256:
        raise CheckpointError(
            f"{checkpoint.uri}/{manifest.wrong_checksum(manifest.MODEL_CONFIG)}; use another"
        )
    return data.decode()


def read_model_state(checkpoint_uri: str) -> tuple[CheckpointManifest, dict[str, Tensor]]:
    """The whole model on the CPU, by parameter name; no process group is needed.

    Tied tensors appear once. A run's URI means its newest checkpoint. Raises CheckpointError if
    there is none or its bytes are wrong.
    """
    checkpoint = _open(checkpoint_uri)
    description = manifest.read_manifest(checkpoint)
    state = dcp.read_whole(checkpoint, description, MODEL)
    return description, {name.removeprefix(MODEL): tensor for name, tensor in state.items()}


def _open(uri: str) -> Storage:
    """The storage of a checkpoint's URI, or of the newest checkpoint of a run's."""
    storage = open_storage(uri)
    try:
        storage.size(manifest.MANIFEST)
        return storage
    except NotFound:
        found = newest(storage)
    if found is None:
        raise CheckpointError(
            f"{uri} is no complete checkpoint, and no run with one; "
            "`ebbtide checkpoints RUN_URI` lists what a run has"
        )
    return open_storage(found.uri)
