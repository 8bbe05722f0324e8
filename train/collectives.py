"""FSDP's communication with the time that a rank waits for it booked as network stall.

Measured where the call blocks the training thread: on CPUs, that is the whole of it, the wait for
slower peers included. On GPUs the calls return at once and communication overlaps with compute;
there only what blocks the host is seen.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from ebbtide.platform.meter import Meter, Owner


class _AllGather(DefaultAllGather):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._meter.measure(Owner.NETWORK_STALL):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        with self._meter.measure(Owner.NETWORK_STALL):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def meter_collectives(model: nn.Module, meter: Meter) -> None:
    """Book the collectives of a sharded model. A reduction may replace its reduce-scatter later."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(_AllGather(meter))
            part.set_custom_reduce_scatter(_ReduceScatter(meter))
