"""Copies of the state into the nodes' memory between saves, shared with peers in the background.

Promises: copies are made after every k-th step, k being the least with which they take at most a
fifth of a processor; a copy is shared before another step is finished, so that the loss of a node
costs k steps at most. The training loop waits for the copy and, if sharing takes longer than a
step, for that.
"""

from __future__ import annotations

import logging
import math
import threading
import time

import torch.distributed as dist

from ebbtide.train.memory import Slot
from ebbtide.train.peers import Moment, PeerMemory

logger = logging.getLogger(__name__)

_KEEPING = 0.2
"""Of the time, at most, a processor works at sharing copies; waiting for it costs nobody."""


def copy_is_due(now_s: float, step_s: float, began_s: float, cost_s: float) -> bool:
    """Whether to make a copy after the step that begins now and will take ``step_s``.

    The last copy was begun at ``began_s``, and sharing one takes ``cost_s`` of a processor.
    """
    return now_s + 1.1 * step_s - began_s >= cost_s / _KEEPING


class Keeper:
    """Copies into the nodes' memory, shared with the peers in the background. Collective."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._began_s, self._cost_s = -math.inf, 0.0
        self._asked_s = time.monotonic()

    def wants_copy(self) -> bool:
        """Whether to make a copy after the step that begins now. Asked before every step."""
        now_s = time.monotonic()
        step_s, self._asked_s = now_s - self._asked_s, now_s
        return copy_is_due(now_s, step_s, self._began_s, self._cost_s)

    def keep(self, moment: Moment, held: Slot | None) -> Slot:
        """Copy the state now, into another slot than the one ``held``, and share it."""
        self.join()
        self._began_s = time.monotonic()
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

    def rest(self) -> None:
        """As :meth:`join`, where the state is in storage anyway: a failure is only told."""
        try:
            self.join()
        except Exception as error:
            logger.warning("the last copy in the nodes' memory could not be shared: %s", error)

    def _share(self, slot: Slot, moment: Moment) -> None:
        worked_s = time.thread_time()
        try:
            self._memory.share(slot, moment, self._group)
        except Exception as error:
            self._failure = error
        self._cost_s = time.thread_time() - worked_s
