"""The memory tier: every rank's state in its own node's and in another node's memory.

Promises: after a save the loss of any one node loses nothing of it, and the next generation, of
whatever size, starts from it without reading storage; the copy before stays whole until a newer one
is. Restoring is from copies of the newest state that is there as a whole. Memory that others fill
or remove is told, and the run goes on. Collective throughout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ebbtide.platform import node_memory
from ebbtide.platform.errors import StorageError
from ebbtide.train.agree import everywhere
from ebbtide.train.memory import (
    Copy,
    Folder,
    Slot,
    layout,
    newest_whole,
    open_copy,
    peer_offset,
    take_rows,
    view,
)
from ebbtide.train.shard import local

logger = logging.getLogger(__name__)

_OWN_SLOTS = 3
"""The newest whole one, the one being written, and one that is being stored."""
_PEER_SLOTS = 2


@dataclass(frozen=True)
class Moment:
    """What a copy says of the run beside the tensors."""

    step: int
    tokens_seen: int
    loss: float | None
    validation_loss: float | None


class PeerMemory:
    """For one generation, whose ranks are on ``nodes``; see :class:`ebbtide.train.memory.Copy`."""

    def __init__(
        self,
        run_uri: str,
        nodes: Sequence[str],
        state: Mapping[str, Tensor],
        token: str,
        job: str,
    ) -> None:
        self._rank, self._world_size = dist.get_rank(), len(nodes)
        self.folder = Folder(run_uri, nodes[self._rank])
        self._state, self._token, self._job = state, token, job
        self._shared, self._refused = 0, False
        self._pieces, self._size_bytes = layout(state)
        self._offset = peer_offset(nodes)
        self._own: list[Slot] = []
        self._peer: list[Slot] = []
        self._next_own = self._next_peer = 0
        self._peer_size = 0
        self._peer_rank = (self._rank - self._offset) % self._world_size

    def open(self) -> bool:
        """Take the memory. False, on all ranks, and a warning, if some rank has too little."""
        sizes: list[int] = [0] * self._world_size
        dist.all_gather_object(sizes, self._size_bytes)
        self._peer_size = sizes[self._peer_rank]
        try:
            everywhere(self._make_slots)
        except StorageError as error:
            for slot in (*self._own, *self._peer):
                slot.path.unlink(missing_ok=True)
            if self._rank == 0:
                logger.warning("no copies in the nodes' memory: %s", error)
            return False
        return True

    def _make_slots(self) -> None:
        node_memory.remove_stale()
        own, peer = f"{self._token}-{self._rank}", f"{self._token}-{self._peer_rank}-peer"
        for number in range(_OWN_SLOTS):
            self._own.append(self.folder.make_slot(f"{own}-{number}", self._size_bytes))
        for number in range(_PEER_SLOTS if self._offset else 0):
            self._peer.append(self.folder.make_slot(f"{peer}-{number}", self._peer_size))

    def copy(self, held: Slot | None) -> Slot:
        """Copy the state, on this rank alone, into a slot that is not ``held`` for storing."""
        slot = self._own[self._next_own]
        if slot is held:
            self._next_own = (self._next_own + 1) % len(self._own)
            slot = self._own[self._next_own]
        self._next_own = (self._next_own + 1) % len(self._own)
        slot.clear()
        for piece in self._pieces:
            view(slot.buffer, piece).copy_(local(self._state[piece.name]))
        return slot

    def tensors(self, slot: Slot) -> dict[str, Tensor]:
        """This rank's parts in a slot, by name."""
        return {piece.name: view(slot.buffer, piece) for piece in self._pieces}

    def share(self, slot: Slot, moment: Moment, group: dist.ProcessGroup) -> None:
        """Give the peer its copy, and describe both. In the background, by all ranks."""
        own = self._describe(slot, moment)
        self._shared += 1
        descriptions: list[Copy | None] = [None] * self._world_size
        dist.all_gather_object(descriptions, own, group=group)
        if self._shared == 2:  # all ranks have now described the first
            self.folder.keep_only(self._token)
        if self._offset:
            target = self._peer[self._next_peer]
            self._next_peer = (self._next_peer + 1) % len(self._peer)
            target.clear()
            to = (self._rank + self._offset) % self._world_size
            sending = dist.isend(slot.buffer, dist.get_global_rank(group, to), group=group)
            assert sending is not None
            dist.recv(target.buffer, dist.get_global_rank(group, self._peer_rank), group=group)
            sending.wait()
            theirs = descriptions[self._peer_rank]
            assert theirs is not None
            self._commit(target, theirs)
        self._commit(slot, own)

    def _commit(self, slot: Slot, copy: Copy) -> None:
        """Describe a copy. What others did to the memory costs it, not the run."""
        try:
            slot.describe(copy)
        except OSError as error:
            if not self._refused:
                logger.warning("copies in this node's memory are lost: %s", error)
            self._refused = True

    def _describe(self, slot: Slot, moment: Moment) -> Copy:
        return Copy(
            token=self._token,
            job=self._job,
            step=moment.step,
            rank=self._rank,
            world_size=self._world_size,
            tokens_seen=moment.tokens_seen,
            loss=moment.loss,
            validation_loss=moment.validation_loss,
            size_bytes=self._size_bytes,
            crc32=slot.crc32,
            pieces=tuple(self._pieces),
        )


def restore(
    run_uri: str, nodes: Sequence[str], state: Mapping[str, Tensor], job: str, newer_than: int
) -> Moment | None:
    """Fill the state from the newest whole copies, if they are of a later step than that.

    ``nodes`` are those of the ranks. None if there is nothing newer of the same job, or it is
    damaged.
    """
    rank = dist.get_rank()
    folder = Folder(run_uri, nodes[rank])
    leads = nodes.index(nodes[rank]) == rank
    own = [
        (copy, path)
        for copy, path in folder.found()
        if leads and copy.job == job and copy.step > newer_than
    ]
    heads = [copy.model_copy(update={"pieces": ()}) for copy, _ in own]
    found: list[list[Copy]] = [[] for _ in nodes]
    dist.all_gather_object(found, heads)
    newest = newest_whole(copy for each in found for copy in each)
    if newest is None:
        return None
    token, step = newest
    mine = {copy.rank: (copy, path) for copy, path in own if (copy.token, copy.step) == newest}
    whole = {old: opened for old, each in mine.items() if (opened := _open(*each)) is not None}
    holders: list[list[int]] = [[] for _ in nodes]
    dist.all_gather_object(holders, sorted(whole))
    sources = {old: holder for holder in reversed(range(len(nodes))) for old in holders[holder]}
    one = next(c for each in found for c in each if (c.token, c.step) == newest)
    if missing := sorted(set(range(one.world_size)) - sources.keys()):
        if rank == 0:
            logger.warning(
                "the copies of step %d in memory are damaged: rank %d's", step, missing[0]
            )
        return None
    for old in range(one.world_size):
        _spread(old, sources[old], whole.get(old), state)
    return Moment(step, one.tokens_seen, one.loss, one.validation_loss)


def _open(copy: Copy, path: Path) -> tuple[Copy, Tensor] | None:
    buffer = open_copy(copy, path)
    return None if buffer is None else (copy, buffer)


def _spread(
    old: int, source: int, held: tuple[Copy, Tensor] | None, state: Mapping[str, Tensor]
) -> None:
    """Bring one old rank's copy to all ranks, each of which takes its rows of it."""
    is_source = dist.get_rank() == source
    description: list[Copy | None] = [held[0] if is_source and held else None]
    dist.broadcast_object_list(description, src=source)
    copy = description[0]
    assert copy is not None
    if is_source:
        assert held is not None
        buffer = held[1]
    else:
        buffer = torch.empty(copy.size_bytes, dtype=torch.uint8)
    _broadcast(buffer, source)
    take_rows(copy, buffer, state)


def _broadcast(buffer: Tensor, source: int) -> None:
    """Bytes on the host, whatever the ranks compute on."""
    if dist.get_backend() == "gloo":
        dist.broadcast(buffer, src=source)
    else:
        moved = buffer.cuda()
        dist.broadcast(moved, src=source)
        buffer.copy_(moved)
