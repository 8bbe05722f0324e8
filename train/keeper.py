"""Copies of the state into the nodes' memory between saves, shared with peers in the background.

Promises: the training loop waits only for the copy and, if it comes too soon, for the one before;
copies are made so seldom that they take at most a fifth of a processor.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from ebbtide.train.memory import Slot
from ebbtide.train.peers import Moment, PeerMemory

_KEEPING = 0.2
"""Of the time, at most, a processor works at sharing copies; waiting for it costs nobody."""


class Keeper:
    """Copies into the nodes' memory, shared with the peers in the background. Collective."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._next_s = 0.0

    def is_ready(self) -> bool:
        """Whether the last copy is shared, and long enough ago for what it cost."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and time.monotonic() >= self._next_s

    def keep(self, moment: Moment, held: Slot | None) -> Slot:
        """Copy the state now, into another slot than the one ``held``, and share it."""
        self.join()
        slot = self._memory.copy(held)
        self._thread = threading.Thread(
            target=self._share, args=(slot, moment), name="ebbtide-keeper", daemon=True
        )
        self._thread.start()
        return slot

    def join(self) -> None:
        """Wait until the last copy is shared. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _share(self, slot: Slot, moment: Moment) -> None:
        start_s, worked_s = time.monotonic(), time.thread_time()
        try:
            self._memory.share(slot, moment, self._group)
        except Exception as error:
            self._failure = error
        self._next_s = start_s + (time.thread_time() - worked_s) / _KEEPING
