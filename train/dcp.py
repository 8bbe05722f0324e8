"""The seam to torch DCP: tensors by name to files in a folder, and back from verified files.

Promises: tensors are written and read sharded as they are, by any number of ranks; a file is
fetched when it is first needed, and used only if it is what the manifest says; DCP's failures
arrive as errors of the tree.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ebbtide.platform.errors import CheckpointError, EbbtideError, NotFound, StorageError
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import Storage
from ebbtide.train.agree import everywhere
from ebbtide.train.manifest import CheckpointManifest, describe_file, wrong_checksum

_METADATA = ".metadata"


class DamagedError(CheckpointError):
    """A checkpoint that is not what its manifest says; an older one may do."""


def write(
    state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write this rank's parts (rank 0: the metadata too) into a folder of its own. Collective.

    Raises StorageError if the folder does not take them.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
    try:
        save(dict(state), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        told = _first_failure(error, f"the training state could not be written to {folder}")
        if isinstance(told, StorageError):
            raise told from error
        raise StorageError(f"{told}; free space there, or set TMPDIR") from error


def read(checkpoint: Storage, manifest: CheckpointManifest, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of ``state`` in place. Collective.

    Raises DamagedError for missing or altered files, CheckpointError for tensors that do not fit.
    """
    with scratch_folder("load") as folder:
        reader = _VerifiedReader(checkpoint, manifest, folder)
        everywhere(lambda: require_fits(checkpoint.uri, reader.read_metadata(), state))
        _load(reader, dict(state), alone=False)


def read_whole(checkpoint: Storage, manifest: CheckpointManifest, prefix: str) -> dict[str, Tensor]:
    """Every tensor whose name starts with ``prefix``, whole, on the CPU, in this process alone."""
    with scratch_folder("load") as folder, warnings.catch_warnings():
        reader = _VerifiedReader(checkpoint, manifest, folder)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in stored.items()
            if name.startswith(prefix)
        }
        _load(reader, state, alone=True)
    return state


def require_fits(where: str, metadata: Metadata, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError naming the first tensor that differs between checkpoint and job."""
    stored = metadata.state_dict_metadata
    for name, tensor in state.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{where} has no {name}; the model or the optimizer has changed")
        if found.size != tensor.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(found.size)}, the job's model expects "
                f"{list(tensor.shape)}; the model has changed"
            )
        if found.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{where}: {name} is {found.properties.dtype}, the job's model expects "
                f"{tensor.dtype}; the model has changed"
            )
    if unknown := sorted(stored.keys() - state.keys()):
        raise CheckpointError(
            f"{where} has {unknown[0]}, which the job's model has not; the model has changed"
        )


class _VerifiedReader(FileSystemReader):
    """Reads a local folder into which it fetches, on first need, files that pass the manifest."""

    def __init__(self, checkpoint: Storage, manifest: CheckpointManifest, folder: Path) -> None:
        super().__init__(folder)
        self._checkpoint, self._folder = checkpoint, folder
        self._entries = {file.key: file for file in manifest.files}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._fetch(_METADATA)
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for key in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self._fetch(key)
        return super().read_data(plan, planner)

    def _fetch(self, key: str) -> None:
        path = self._folder / key
        if path.exists():
            return
        if key not in self._entries:
            raise DamagedError(f"{self._checkpoint.uri}: the manifest does not name {key}")
        try:
            self._checkpoint.get_file(key, path)
        except NotFound as error:
            raise DamagedError(str(error)) from error
        if describe_file(key, path) != self._entries[key]:
            raise DamagedError(f"{self._checkpoint.uri}/{wrong_checksum(key)}")


def _load(reader: _VerifiedReader, state: dict[str, Tensor], *, alone: bool) -> None:
    try:
        load(state, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise _first_failure(error, "the training state could not be read") from error


def _first_failure(error: CheckpointException, what: str) -> EbbtideError:
    """One error of the tree out of what DCP has collected from all ranks."""
    failures = sorted((rank, failure) for rank, (failure, _) in error.failures.items())
    for _, failure in failures:
        if isinstance(failure, EbbtideError):
            return failure
    for rank, failure in failures:
        return CheckpointError(f"{what}: rank {rank}: {type(failure).__name__}: {failure}")
    return CheckpointError(what)
