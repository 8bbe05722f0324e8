"""Who owns each moment of a process: the training thread's time, split among owners.

Promises: measured time is never counted twice (inside a nested ``measure`` the inner owner owns the
time, the outer one the rest), spans of one meter do not overlap and never run backwards, and a
measure costs a few microseconds and no I/O. Time that no measure covers is left to the accounting.

The metered thread is the first one that measures; a ``measure`` in any other thread counts nothing,
as what a background thread does is hidden behind the training thread by definition.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Protocol

from ebbtide.platform.clock import Clock

_DRIFT_S = 1.0
"""Wall time this far ahead of the meter's (the machine slept) moves the meter forward."""


class Owner(StrEnum):
    """What a node-second was spent on. ``docs/costs.md`` says how each one is measured."""

    COMPUTE = "compute"
    DATA_STALL = "data_stall"
    NETWORK_STALL = "network_stall"
    CHECKPOINT_STALL = "checkpoint_stall"
    RESTART = "restart"
    LOST_WORK = "lost_work"
    VALIDATION = "validation"
    IDLE = "idle"


class SpanSink(Protocol):
    """Where a meter's spans go; the ledger's is :class:`ebbtide.platform.ledger.SpanRecorder`."""

    def span(self, owner: Owner, start_s: float, end_s: float, step: int | None) -> None:
        """One stretch of time (epoch seconds). Called often, under the meter's lock: no I/O."""

    def attach(self, cut: Callable[[], None]) -> None:
        """Called once with a function, safe in any thread, that emits the open span up to now."""


class Meter:
    """Splits the time of one process among owners, and hands every span to ``sink``.

    ``step`` is the 1-based number of the step at work (the count of finished steps once it is
    done), or None outside of steps; setting it cuts the open span.
    """

    def __init__(self, clock: Clock, sink: SpanSink | None = None) -> None:
        self._clock, self._sink = clock, sink
        self._lock = threading.RLock()
        self._offset_s = clock.time() - clock.monotonic()
        self._since_s = self._now()
        self._thread: int | None = None
        self._stack: list[Owner] = []
        self._step: int | None = None
        self._taken: dict[Owner, float] = {}
        if sink is not None:
            sink.attach(self.cut)

    @property
    def step(self) -> int | None:
        """The 1-based step at work; None outside of steps."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        with self._lock:
            self._cut()
            self._step = step

    @contextlib.contextmanager
    def measure(self, owner: Owner) -> Iterator[None]:
        """The time inside belongs to ``owner``, also when it raises."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if threading.get_ident() != self._thread:
            yield
            return
        with self._lock:
            self._cut()
            self._stack.append(owner)
        try:
            yield
        finally:
            with self._lock:
                self._cut()
                self._stack.pop()

    def take(self) -> dict[Owner, float]:
        """Seconds by owner since the last take, the open measure's up to now included."""
        with self._lock:
            self._cut()
            taken, self._taken = self._taken, {}
            return taken

    def cut(self) -> None:
        """Emit the open span up to now and go on with it. Safe in any thread."""
        with self._lock:
            self._cut()
            ahead_s = self._clock.time() - self._now()
            if ahead_s > _DRIFT_S:
                self._offset_s += ahead_s
                self._since_s = self._now()

    def _now(self) -> float:
        return self._offset_s + self._clock.monotonic()

    def _cut(self) -> None:
        now_s = self._now()
        if self._stack and now_s > self._since_s:
            owner = self._stack[-1]
            self._taken[owner] = self._taken.get(owner, 0.0) + now_s - self._since_s
            if self._sink is not None:
                self._sink.span(owner, self._since_s, now_s, self._step)
        self._since_s = now_s
