"""Checkpoints that are stored while the run makes further steps.

Promises: the training loop waits only for a copy of the parameters and, where the save before is
not stored yet, for a few seconds for that; one that takes longer makes the next one be left out,
with a warning, on all ranks alike. A save that the storage refuses is told and left: the run goes
on. Whatever is saved last can be waited for, and then its failure is an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.platform.errors import StorageError
from ebbtide.train import retention
from ebbtide.train.agree import total
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.keeper import Keeper
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.memory import Slot
from ebbtide.train.peers import Moment, PeerMemory
from ebbtide.train.shard import local

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and how long it took from the copy to the commit."""

    info: CheckpointInfo
    took_s: float


class Saver:
    """Saves ``state`` for one generation. Every rank has one and calls the same methods in turn.

    The constructor is collective: the background has a process group of its own, so that it never
    comes between the collectives of the training loop.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: Mapping[str, Tensor],
        memory: PeerMemory | None = None,
    ) -> None:
        self._checkpoints, self._state = checkpoints, state
        self._folder = memory.folder if memory is not None else None
        self._memory = memory if memory is not None and memory.open() else None
        self._keeper = Keeper(self._memory) if self._memory is not None else None
        self._stored: Slot | None = None
        self._copies: dict[str, Tensor] = {}
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._outcomes: list[Saved | Exception] = []

    def begin(self, moment: Moment, *, must: bool = False) -> None:
        """Copy the state of this moment, and store it in the background.

        If the save before is still at work after a few seconds, this one is left out, unless it
        ``must`` be made. Collective.
        """
        if self._thread is not None:
            self._thread.join(None if must else _PATIENCE_S)
        device = next(iter(self._state.values())).device
        is_busy = self._thread is not None and self._thread.is_alive()
        if int(total(torch.tensor(is_busy, dtype=torch.int32, device=device))):
            if dist.get_rank() == 0:
                logger.warning(
                    "no checkpoint of step %d: the one before is not stored yet; "
                    "raise checkpoint.every_steps, or see to the storage",
                    moment.step,
                )
            return
        self._thread = threading.Thread(
            target=self._store,
            args=(self._copy(moment), moment),
            name="ebbtide-saver",
            daemon=True,
        )
        self._thread.start()

    def take(self) -> list[Saved]:
        """The saves that have been committed since the last call.

        Raises what went wrong with one, but for refusals of the storage, which are logged.
        """
        saved = []
        while self._outcomes:
            outcome = self._outcomes.pop(0)
            if isinstance(outcome, StorageError):
                if dist.get_rank() == 0:
                    logger.warning("the run goes on without a checkpoint: %s", outcome)
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                saved.append(outcome)
        return saved

    def wait(self) -> list[Saved]:
        """As :meth:`take`, once the save at work is over; its refusal is raised, too."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._outcomes and isinstance(last := self._outcomes[-1], StorageError):
            raise last
        return self.take()

    def wants_copy(self) -> bool:
        """Whether this rank would make a copy in memory after the step at work."""
        return self._keeper is not None and self._keeper.is_ready()

    def keep(self, moment: Moment) -> None:
        """Copy the state into the nodes' memory. By all ranks, if rank 0 wants to."""
        if self._keeper is not None:
            self._keeper.keep(moment, self._stored if self._is_storing() else None)

    def forget(self) -> None:
        """The run is finished: copies in the nodes' memory, older ones too, are of no more use."""
        if self._keeper is not None:
            self._keeper.join()
        if self._folder is not None:
            self._folder.remove()

    def _is_storing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _copy(self, moment: Moment) -> dict[str, Tensor]:
        """This rank's parts of the state as they are now, by name."""
        if self._keeper is not None and self._memory is not None:
            self._stored = self._keeper.keep(moment, None)
            return self._memory.tensors(self._stored)
        for name, tensor in self._state.items():
            part = local(tensor)
            if name not in self._copies:
                self._copies[name] = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
            self._copies[name].copy_(part, non_blocking=True)
        if any(copy.is_pinned() for copy in self._copies.values()):
            torch.cuda.synchronize()
        return self._copies

    def _store(self, parts: Mapping[str, Tensor], moment: Moment) -> None:
        start_s = time.monotonic()
        whole = {name: _like(parts[name], tensor) for name, tensor in self._state.items()}
        try:
            info = self._checkpoints.save(
                whole,
                moment.step,
                moment.tokens_seen,
                moment.loss,
                moment.validation_loss,
                self._group,
            )
            if dist.get_rank() == 0:
                self._collect(info)
            self._outcomes.append(Saved(info, time.monotonic() - start_s))
        except Exception as error:
            self._outcomes.append(error)

    def _collect(self, committed: CheckpointInfo) -> None:
        """Remove what is of no more use; of a finished run, all that is not finished."""
        config = self._checkpoints.config
        keep = config.checkpoint
        if committed.step == config.steps:
            keep = keep.model_copy(update={"grace_s": 0.0})
        retention.collect(self._checkpoints.run, committed, keep)


def _like(part: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return part
    mesh = tensor.device_mesh
    return DTensor.from_local(
        part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
