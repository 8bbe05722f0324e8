"""Gradients summed in an order that does not depend on the ranks: bitwise the same for any world.

Promises: the gradient of a step is the sum of its micro-batches' gradients along one binary tree
over their numbers, and its norm is a sum of integers. So parameters, optimizer state and losses are
bitwise equal for every history of world sizes on one hardware type, software build and number of
threads (:func:`ebbtide.train.resume.fingerprint` names them).

The tree's node ``(level, index)`` is the sum of the micro-batches ``[index << level, (index + 1) <<
level)`` that exist. A rank has consecutive micro-batches, adds up what nodes lie whole within them
as a binary counter would, and sends each node's shards to their owners once a step; an owner joins
the nodes of all ranks along the same tree. With a power of two of ranks that divides the number of
micro-batches, that is one exchange a step, as many bytes as a reduce-scatter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ebbtide.platform.meter import Meter, Owner
from ebbtide.train.generation import Generation
from ebbtide.train.shard import local

Node = tuple[int, int]
"""A node of the tree, by level and index within it; level 0 are the micro-batches."""

_BITS = 24  # of a gradient's largest magnitude; smaller ones keep fewer, as in fixed point
_CPU_CHUNK, _CUDA_CHUNK = 1 << 16, 1 << 26  # elements at once: what stays in the cache; few kernels
_SAFE = 1 << 14  # squares of 24 bits that add up within 63


def is_pair(left: Node, right: Node) -> bool:
    """Whether two nodes are the two halves of another."""
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


def nodes_within(first: int, stop: int) -> list[Node]:
    """The fewest nodes that make up the micro-batches ``[first, stop)``, in order."""
    nodes: list[Node] = []
    for number in range(first, stop):
        nodes.append((0, number))
        while len(nodes) > 1 and is_pair(*nodes[-2:]):
            level, index = nodes.pop()
            nodes[-1] = (level + 1, index // 2)
    return nodes


def add_up(nodes: Mapping[Node, Tensor], micro_batches: int) -> Tensor:
    """The root of the tree over ``micro_batches``, from nodes that make it up. In place."""

    def total(level: int, index: int) -> Tensor:
        if (level, index) in nodes:
            return nodes[level, index]
        left = total(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= micro_batches:
            return left
        return left.add_(total(level - 1, 2 * index + 1))

    return total((micro_batches - 1).bit_length(), 0)


class ExactReduction:
    """A :class:`ebbtide.train.shard.Reduction` over a model that FSDP2 has sharded."""

    def __init__(
        self, model: nn.Module, generation: Generation, micro_batches: int, meter: Meter
    ) -> None:
        self._parameters = list(model.parameters())
        self._plan = _Plan(generation, micro_batches)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                exchange = _Exchange(self._plan, meter)
                part.set_custom_reduce_scatter(exchange)
                part.set_all_reduce_hook(exchange.finish)

    def start_round(self, round_index: int, rounds: int) -> None:
        self._plan.start_round(round_index, rounds)
        for parameter in self._parameters:
            parameter.grad = None  # what a round but the last leaves there means nothing

    def clip(self, max_norm: float) -> float:
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        norm = exact_norm(gradients)
        if 0 < max_norm < norm < math.inf:
            factor = max_norm / norm
            for gradient in gradients:
                gradient.mul_(factor)
        return norm


@dataclass
class _Plan:
    """Where a step is, for all parts of one model on this rank."""

    generation: Generation
    micro_batches: int
    number: int | None = None
    is_last: bool = False
    slots: list[list[Node | None]] = field(init=False)
    """Of each exchange, the node that every rank sends in it."""

    def __post_init__(self) -> None:
        worlds = range(self.generation.world_size)
        sent = [nodes_within(*self.generation.span(self.micro_batches, rank)) for rank in worlds]
        self.slots = [
            [nodes[slot] if slot < len(nodes) else None for nodes in sent]
            for slot in range(max(map(len, sent)))
        ]
        self._share = list(self.generation.share(self.micro_batches))

    def start_round(self, round_index: int, rounds: int) -> None:
        self.number = self._share[round_index]
        self.is_last = round_index == rounds - 1


class _Exchange(ReduceScatter):
    """The reduce-scatter of one FSDP part. What FSDP packs stays in its buffer until it is summed.

    FSDP allocates the input and then the output of each round, fills the input, calls this with
    more than one rank, and always calls the hook (:meth:`finish`) with the output, which becomes
    the parameters' gradient. It is filled in the last round only.
    """

    def __init__(self, plan: _Plan, meter: Meter) -> None:
        self._plan, self._meter = plan, meter
        self._free: list[Tensor] = []
        self._nodes: dict[Node, Tensor] = {}
        self._input: Tensor | None = None
        self._total: Tensor | None = None
        self._freed: torch.cuda.Event | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self._input is not None:  # the second of a round: the output
            return torch.empty(*size, dtype=dtype, device=device)
        if self._freed is not None:
            torch.cuda.current_stream().wait_event(self._freed)
        self._input = self._free.pop() if self._free else None
        if self._input is None or list(self._input.shape) != list(size):
            self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._keep()
        if self._plan.is_last:
            self._total = self._exchanged(output_tensor.numel(), group)

    def finish(self, output: Tensor) -> None:
        """Leave the sum over the global batch in the last round's output."""
        if self._plan.generation.world_size == 1:
            self._keep()
        if not self._plan.is_last:
            return
        whole = self._total
        if whole is None:
            whole = add_up(self._nodes, self._plan.micro_batches)
        output.copy_(whole)
        self._total = None
        self._release(*self._nodes.values())
        self._nodes.clear()

    def _keep(self) -> None:
        """Take the round's input as a leaf, and add up what is now whole."""
        taken, self._input = self._input, None
        assert taken is not None
        if self._plan.number is None:  # a surplus pass
            self._release(taken)
            return
        node = (0, self._plan.number)
        while self._nodes and is_pair(last := next(reversed(self._nodes)), node):
            left = self._nodes.pop(last)
            left.add_(taken)
            self._release(taken)
            taken, node = left, (node[0] + 1, node[1] // 2)
        self._nodes[node] = taken

    def _release(self, *buffers: Tensor) -> None:
        self._free.extend(buffers)
        if buffers and buffers[0].is_cuda:
            self._freed = torch.cuda.current_stream().record_event()

    def _exchanged(self, shard_numel: int, group: dist.ProcessGroup) -> Tensor:
        """The sum over the global batch of this rank's shard."""
        own = list(self._nodes.values())
        found: dict[Node, Tensor] = {}
        world_size, rank = self._plan.generation.world_size, self._plan.generation.rank
        like = own[0] if own else self._free[0]
        for slot, nodes in enumerate(self._plan.slots):
            sends = nodes[rank] is not None
            from_ranks = [shard_numel if node is not None else 0 for node in nodes]
            received = like.new_empty(sum(from_ranks))
            with self._meter.measure(Owner.NETWORK_STALL):
                dist.all_to_all_single(
                    received,
                    own[slot] if sends else like.new_empty(0),
                    output_split_sizes=from_ranks,
                    input_split_sizes=[shard_numel if sends else 0] * world_size,
                    group=group,
                )
            present = [node for node in nodes if node is not None]
            found.update(zip(present, received.view(-1, shard_numel).unbind(0), strict=True))
        return add_up(found, self._plan.micro_batches)


def exact_norm(gradients: Sequence[Tensor]) -> float:
    """The Euclidean norm of a gradient that is spread over ranks. Collective.

    Every element is taken as an integer of 24 bits against the power of two above the largest; the
    squares add up without rounding, in whatever order. Infinity if an element is not finite.
    """
    device = gradients[0].device
    largest = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in gradients:
        if gradient.numel():
            largest = torch.maximum(largest, gradient.abs().amax())
    largest = torch.where(largest.isfinite(), largest, math.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if not 0 < (top := float(largest)) < math.inf:
        return top
    exponent = _BITS - math.frexp(top)[1]
    at_once = _CUDA_CHUNK if device.type == "cuda" else _CPU_CHUNK
    sums = [
        part
        for gradient in gradients
        for piece in torch.split(gradient.flatten(), at_once)
        for part in _sums_of_squares(piece, math.ldexp(1.0, exponent))
    ]
    every = torch.cat(sums)
    halves = torch.stack([(every >> 32).sum(), (every & 0xFFFFFFFF).sum()])
    dist.all_reduce(halves)
    high, low = halves.tolist()
    return math.ldexp(math.sqrt((high << 32) + low), -exponent)


def _sums_of_squares(piece: Tensor, scale: float) -> Iterator[Tensor]:
    """The squares of the scaled and rounded elements, int64, added up as far as they fit."""
    squares = piece.double().mul_(scale).round_().square_().to(torch.int64)
    whole = squares.numel() // _SAFE * _SAFE
    yield squares[:whole].view(-1, _SAFE).sum(1)
    yield squares[whole:].sum().view(1)


def make_deterministic(device: torch.device) -> None:
    """Have this process choose kernels that give the same bits every time. Before any GPU work."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
