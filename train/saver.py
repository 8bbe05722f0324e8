"""Checkpoints that are stored while the run makes further steps.

Promises: the training loop waits only for a copy of the parameters and, where saves come faster
than they are stored, for a small share of the time; a save that falls due while the one before is
being stored is made after it or left out, with a warning, on all ranks alike; memory for one save
is all that is ever used. A save that the storage refuses is told
and left: the run goes on. What is saved last is tried for longer, and then its failure is an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.platform.errors import StorageError
from ebbtide.train import retention
from ebbtide.train.agree import total
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.keeper import Keeper
from ebbtide.train.last_save import insist
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.memory import Slot
from ebbtide.train.peers import Moment, PeerMemory
from ebbtide.train.rhythm import NO_INTERRUPTIONS, Interruptions, Patience, Rhythm
from ebbtide.train.shard import local

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and how long it took from the copy to the commit."""

    info: CheckpointInfo
    took_s: float


@dataclass(frozen=True)
class Missed:
    """A save that fell due and was left out, or that the storage refused."""

    step: int
    why: Literal["left out", "failed"]
    message: str


@dataclass(frozen=True)
class _Refused:
    step: int
    error: StorageError

    @property
    def missed(self) -> Missed:
        return Missed(self.step, "failed", str(self.error))


class Saver:
    """Saves ``state`` for one generation. Every rank has one and calls the same methods in turn.

    The constructor is collective: the background has a process group of its own, so that it never
    comes between the collectives of the training loop. ``is_owed``: the state is in no checkpoint.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: Mapping[str, Tensor],
        memory: PeerMemory | None = None,
        interruptions: Interruptions = NO_INTERRUPTIONS,
        *,
        is_owed: bool = False,
    ) -> None:
        self._checkpoints, self._state = checkpoints, state
        self._folder = memory.folder if memory is not None else None
        self._memory = memory if memory is not None and memory.open() else None
        self._keeper = Keeper(self._memory) if self._memory is not None else None
        self._stored: Slot | None = None
        self._copies: dict[str, Tensor] = {}
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._patience, self._began_s = Patience(time.monotonic()), 0.0
        self._outcomes: list[Saved | _Refused | Exception] = []
        self._step_at_work = 0
        self._missed: list[Missed] = []
        self._left_out, self._warns_s = 0, 0.0
        self._rhythm = Rhythm(
            checkpoints.config.checkpoint, interruptions, time.monotonic(), is_owed=is_owed
        )

    def wants_save(self, step: int) -> bool:
        """Whether this rank would save after the step that is about to be made. By rank 0."""
        now_s = time.monotonic()
        is_busy = self._is_storing() and not (
            self._rhythm.is_counted
            and self._patience.allows(now_s, self._rhythm.done_s(self._began_s))
        )
        wants, left_out = self._rhythm.ask(step, now_s, is_busy=is_busy)
        if left_out is not None:
            self._leave_out(left_out)
        return wants

    def begin(self, moment: Moment, *, must: bool = False) -> None:
        """Copy the state of this moment, and store it in the background.

        If the save before is still at work, on any rank, and stays so for longer than there is
        patience, this one waits for a later step, unless it ``must`` be made; the copy in memory is
        made all the same. Collective.
        """
        start_s = time.monotonic()
        if self._thread is not None:
            self._thread.join(None if must else self._patience.left_s(start_s))
            self._patience.spend(time.monotonic() - start_s, time.monotonic())
        device = next(iter(self._state.values())).device
        if int(total(torch.tensor(self._is_storing(), dtype=torch.int32, device=device))):
            self.keep(moment)
            return
        start_s = time.monotonic()
        parts = self._copy(moment)
        stall_s = time.monotonic() - start_s
        self._began_s, self._step_at_work = start_s, moment.step
        self._thread = threading.Thread(
            target=self._store, args=(parts, moment, stall_s), name="ebbtide-saver", daemon=True
        )
        self._thread.start()
        self._rhythm.began(start_s)

    def _leave_out(self, step: int) -> None:
        message = f"the one of step {self._step_at_work} is not stored yet"
        self._missed.append(Missed(step, "left out", message))
        self._left_out += 1
        if dist.get_rank() == 0 and time.monotonic() >= self._warns_s:
            self._warns_s = time.monotonic() + _WARNING_INTERVAL_S
            logger.warning(
                "no checkpoint of step %d: %s (%d left out so far); save less often "
                "(checkpoint.every), or see to the storage",
                step,
                message,
                self._left_out,
            )

    def take(self) -> list[Saved]:
        """The saves that have been committed since the last call.

        Raises what went wrong with one, but for refusals of the storage, which are logged.
        """
        saved = []
        while self._outcomes:
            outcome = self._outcomes.pop(0)
            if isinstance(outcome, _Refused):
                self._missed.append(outcome.missed)
                if dist.get_rank() == 0:
                    logger.warning(
                        "the run goes on without a checkpoint of step %d: %s",
                        outcome.step,
                        outcome.error,
                    )
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                saved.append(outcome)
        return saved

    def missed(self) -> list[Missed]:
        """The saves that came to nothing since the last call. Complete on rank 0."""
        missed, self._missed = self._missed, []
        return missed

    def wait(self) -> list[Saved]:
        """As :meth:`take`, once the save at work is over; its refusal is raised, too.

        What came before a refusal is left for :meth:`take`. The last copy is with the peers then.
        """
        if self._keeper is not None:
            self._keeper.rest()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._outcomes and isinstance(last := self._outcomes[-1], _Refused):
            self._outcomes.pop()
            self._missed.append(last.missed)
            raise last.error
        return self.take()

    def wants_copy(self) -> bool:
        """Whether this rank would make a copy in memory after the step at work."""
        return self._keeper is not None and self._keeper.wants_copy()

    def share(self) -> None:
        """Wait until the last copy in memory is with the peers. Raises what went wrong."""
        if self._keeper is not None:
            self._keeper.join()

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

    def _store(self, parts: Mapping[str, Tensor], moment: Moment, stall_s: float) -> None:
        start_s, worked_s = time.monotonic(), time.thread_time()
        whole = {name: _like(parts[name], tensor) for name, tensor in self._state.items()}
        try:
            info = self._save(whole, moment)
            took_s = time.monotonic() - start_s
            self._outcomes.append(Saved(info, took_s))
            if dist.get_rank() == 0:
                self._collect(info)
            shares_cores = next(iter(self._state.values())).device.type == "cpu"
            worked_s = time.thread_time() - worked_s if shares_cores else 0.0
            self._rhythm.ended(stall_s + worked_s, took_s, time.monotonic())
        except StorageError as error:
            self._outcomes.append(_Refused(moment.step, error))
        except Exception as error:
            self._outcomes.append(error)

    def _save(self, state: Mapping[str, Tensor], moment: Moment) -> CheckpointInfo:
        config, group = self._checkpoints.config, self._group
        save = partial(
            self._checkpoints.save,
            state,
            moment.step,
            moment.tokens_seen,
            moment.loss,
            moment.validation_loss,
            group,
        )
        is_last = moment.step == config.steps
        return insist(save, config.checkpoint.give_up_s if is_last else 0.0, group)

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
