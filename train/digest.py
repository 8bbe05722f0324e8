"""Digests of the training state, the same for any sharding: the proof that two runs are one.

A tensor's digest is a linear hash modulo 2^64 of the bits of its elements: the sum, over rows and
columns, of element x row key x column key, with odd pseudo-random keys. Sums of integers do not
depend on their order, so that shards are hashed where they lie. It finds any difference by accident
(a chance of about 2^-60), not one by design.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1 << 48  # where the keys of columns begin; those of rows begin at 0
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def state_digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each tensor by name, 16 hexadecimal digits. Collective.

    Tensors are sharded by rows, or whole and equal on every rank.
    """
    hashes = torch.stack([_own_part(tensor) for tensor in state.values()])
    dist.all_reduce(hashes)
    return {
        name: f"{value % 2**64:016x}" for name, value in zip(state, hashes.tolist(), strict=True)
    }


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank adds to a tensor's hash."""
    if not isinstance(tensor, DTensor):
        return _hash(tensor, 0) * (dist.get_rank() == 0)
    mesh = tensor.device_mesh
    rows = math.ceil(tensor.shape[0] / mesh.size())
    return _hash(tensor.to_local(), rows * mesh.get_local_rank())


def _hash(values: Tensor, first_row: int) -> Tensor:
    rows = values.shape[0] if values.ndim else 1
    bits = values.detach().contiguous().view(_BIT_TYPES[values.element_size()])
    bits = bits.reshape(rows, values.numel() // max(rows, 1)).to(torch.int64)
    across = (bits * _keys(_COLUMNS, bits.shape[1], values.device)).sum(1)
    return (across * _keys(first_row, rows, values.device)).sum()


@lru_cache(maxsize=256)
def _keys(first: int, count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, int64 ``[count]``: splitmix64's finalizer of a counter."""
    state = torch.arange(first + 1, first + count + 1, device=device) * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        logical = (state >> shift) & ((1 << (64 - shift)) - 1)
        state = (state ^ logical) * (factor - 2**64 if factor >> 63 else factor)
    return state | 1
