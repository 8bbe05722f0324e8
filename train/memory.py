"""Copies of the training state in a node's memory: files in /dev/shm that outlive their process.

A folder per run and node holds slots. A slot is a flat copy of one rank's shards after some step,
and, written last, a description of it; while a slot is being written it has none. Promises: a copy
that is described is whole (its checksum is verified before it is used); what does not fit in memory
is refused before it is written; nothing is read from the folder of another node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.platform import node_memory
from ebbtide.platform.config import Config
from ebbtide.platform.errors import StorageError

_ALIGNMENT = 64


class Piece(Config):
    """One tensor of a rank's copy: whole rows from ``first_row`` on, at a byte ``offset``.

    ``shape`` is that of the whole tensor; a tensor without dimensions has one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first_row: int
    rows: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        numel = self.rows
        for size in self.shape[1:]:
            numel *= size
        return numel


class Copy(Config):
    """What a slot holds: the shards of ``rank`` of ``world_size`` after ``step`` steps.

    ``token`` names the attempt that wrote it, ``job`` is a digest of what it was to compute.
    """

    token: str
    job: str
    step: int
    rank: int
    world_size: int
    tokens_seen: int
    loss: float | None
    validation_loss: float | None
    size_bytes: int
    crc32: int
    pieces: tuple[Piece, ...]


def layout(state: Mapping[str, Tensor]) -> tuple[list[Piece], int]:
    """Where each tensor's local rows lie in a flat copy, and how many bytes that has."""
    pieces, offset = [], 0
    for name, tensor in state.items():
        first_row, part = rows_of(tensor)
        pieces.append(
            Piece(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                first_row=first_row,
                rows=part.shape[0] if part.ndim else 1,
                offset=offset,
            )
        )
        size = part.numel() * part.element_size()
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return pieces, max(offset, _ALIGNMENT)


def rows_of(tensor: Tensor) -> tuple[int, Tensor]:
    """The first row of this rank's part of a tensor, and the part; shards are whole rows."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return min(chunk * mesh.get_local_rank(), tensor.shape[0]), tensor.to_local()


def view(buffer: Tensor, piece: Piece) -> Tensor:
    """A piece of a flat copy (uint8) as a tensor of its rows."""
    dtype: torch.dtype = getattr(torch, piece.dtype)
    size = piece.numel * dtype.itemsize
    flat = buffer[piece.offset : piece.offset + size].view(dtype)
    return flat.view(piece.rows, *piece.shape[1:]) if piece.shape else flat.view(())


def take_rows(copy: Copy, buffer: Tensor, state: Mapping[str, Tensor]) -> None:
    """Put those rows of a copy into the state that this rank has."""
    for piece in copy.pieces:
        tensor = state[piece.name]
        first, part = rows_of(tensor)
        source = view(buffer, piece)
        if not isinstance(tensor, DTensor):
            part.copy_(source)
            continue
        begin = max(first, piece.first_row)
        end = min(first + part.shape[0], piece.first_row + piece.rows)
        if begin < end:
            part[begin - first : end - first].copy_(
                source[begin - piece.first_row : end - piece.first_row]
            )


@dataclass
class Slot:
    """A flat copy in memory that is backed by a file, and may be described."""

    path: Path
    buffer: Tensor

    def clear(self) -> None:
        """It is about to be written."""
        with contextlib.suppress(FileNotFoundError):
            self._description.unlink()

    def describe(self, copy: Copy) -> None:
        """It is whole."""
        temporary = self._description.with_suffix(".new")
        temporary.write_text(copy.model_dump_json())
        temporary.rename(self._description)

    @property
    def _description(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def crc32(self) -> int:
        """The checksum of its content."""
        return _crc32(self.buffer)


class Folder:
    """The copies of one run on one node."""

    def __init__(self, run_uri: str, node: str, root: Path = node_memory.ROOT) -> None:
        self.path = node_memory.folder(run_uri, node, root)

    def make_slot(self, name: str, size_bytes: int) -> Slot:
        """A slot of that size. Raises StorageError if it does not fit in memory."""
        path = self.path / f"{name}.copy"
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.truncate(descriptor, size_bytes)
                os.posix_fallocate(descriptor, 0, size_bytes)  # else a full memory is a SIGBUS
            finally:
                os.close(descriptor)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageError(
                f"{path}: no room for {size_bytes / 1e6:.0f} MB: {error.strerror}"
            ) from error
        buffer = torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
        return Slot(path, buffer)

    def found(self) -> list[tuple[Copy, Path]]:
        """The described copies."""
        copies = []
        for path in sorted(self.path.glob("*.json")):
            with contextlib.suppress(FileNotFoundError, ValidationError):
                copy = Copy.model_validate_json(path.read_text())
                copies.append((copy, path.with_suffix(".copy")))
        return copies

    def keep_only(self, token: str) -> None:
        """Forget the copies of other attempts."""
        for path in self.path.glob("*"):
            if not path.name.startswith(f"{token}-"):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget everything; processes that have it mapped keep what they see."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_copy(copy: Copy, path: Path) -> Tensor | None:
    """The flat copy (uint8), if it is what its description says; a private one of this process."""
    try:
        buffer = torch.from_file(str(path), shared=False, size=copy.size_bytes, dtype=torch.uint8)
    except (RuntimeError, OSError):
        return None
    return buffer if _crc32(buffer) == copy.crc32 else None


def _crc32(buffer: Tensor) -> int:
    return zlib.crc32(buffer.numpy().data)


def peer_offset(nodes: Sequence[str]) -> int:
    """How many ranks further the rank is that holds a rank's second copy; 0: there is none.

    The smallest number with which the fewest ranks have their second copy on their own node.
    """
    size = len(nodes)

    def same(offset: int) -> int:
        return sum(nodes[rank] == nodes[(rank + offset) % size] for rank in range(size))

    best = min(range(1, size), key=lambda offset: (same(offset), offset), default=0)
    return best if best and same(best) < size else 0


def newest_whole(copies: Iterable[Copy]) -> tuple[str, int] | None:
    """Token and step of the newest state of which every rank's copy is there."""
    ranks: dict[tuple[int, str], set[int]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for copy in copies:
        key = (copy.step, copy.token)
        ranks.setdefault(key, set()).add(copy.rank)
        sizes[key] = copy.world_size
    whole = [key for key, found in ranks.items() if len(found) == sizes[key]]
    if not whole:
        return None
    step, token = max(whole)
    return token, step
