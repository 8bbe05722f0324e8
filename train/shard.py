"""FSDP2 over a model's blocks, and the one reduction of gradients that the step works with.

Promises: after the last round of a step every parameter's gradient is the plain **sum** of what the
ranks' passes contributed; weighting is the loss's business. Nothing here depends on the number of
ranks but the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class Reduction(Protocol):
    """How the gradients of a step's rounds become one sum. Chosen in one place: the loop."""

    def start_round(self, round_index: int, rounds: int) -> None:
        """Called on every rank before the pass of a round."""

    def clip(self, max_norm: float) -> float:
        """After the last round: the gradient's global norm; scale it down to ``max_norm``.

        0 switches clipping off. The norm returned is from before.
        """


class PlainReduction:
    """Passes add up on each rank; one reduce-scatter in the last round sums over ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def start_round(self, round_index: int, rounds: int) -> None:
        cast(FSDPModule, self._model).set_requires_gradient_sync(round_index == rounds - 1)

    def clip(self, max_norm: float) -> float:
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(full(norm))


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: the modules in its outermost ``nn.ModuleList``s."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from blocks(child)


def checkpoint_activations(model: nn.Module) -> None:
    """Keep no activations inside the blocks; the backward pass computes them again."""
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> nn.Module:
    """Shard a model in place over a one-dimensional mesh; master weights stay fp32.

    ``bf16`` computes in bfloat16 and reduces gradients in fp32.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return model


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over ranks; then all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
