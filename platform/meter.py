"""Who owns each moment of a process: the training thread's time, split among owners.

Promises: measured time is never counted twice (inside a nested ``measure`` the inner owner owns the
time, the outer one the rest), spans of one meter do not overlap and never run backwards, and a
measure costs a few microseconds and no I/O. Time that no measure covers is left to the accounting.

The metered thread is the first one that measures; a ``measure`` in any other thread counts nothing,
as what a background thread does is hidden behind the training thread by definition.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from ebbtide.platform.clock import Clock

_GAP_S = 0.05
"""Shorter gaps between measures stay inside a span, whose seconds then sum to less than it."""

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

    __hash__ = str.__hash__  # agrees with str's equality, and is fast


class SpanSink(Protocol):
    """Where a meter's spans go; the ledger's is :class:`ebbtide.platform.ledger.SpanRecorder`."""

    def span(
        self, start_s: float, end_s: float, seconds: Mapping[Owner, float], step: int | None
    ) -> None:
        """A stretch of measured time (epoch seconds) and how it divides, in order of time.

        Called once or twice a step, under the meter's lock: no I/O.
        """

    def attach(self, cut: Callable[[], None]) -> None:
        """Called once with a function, safe in any thread, that emits the open span up to now."""


class _Measure:
    """The context manager of an owner. It holds no state, so one serves all measures."""

    __slots__ = ("_meter", "_owner")

    def __init__(self, meter: Meter, owner: Owner) -> None:
        self._meter, self._owner = meter, owner

    def __enter__(self) -> None:
        self._meter._enter(self._owner)

    def __exit__(self, *_: object) -> None:
        self._meter._leave()


class Meter:
    """Splits the time of one process among owners, and hands ``sink`` a span for every step.

    ``step`` is the 1-based number of the step at work (the count of finished steps once it is
    done), or None outside of steps.
    """

    def __init__(self, clock: Clock, sink: SpanSink | None = None) -> None:
        self._clock, self._monotonic, self._sink = clock, clock.monotonic, sink
        self._lock = threading.Lock()
        self._offset_s = max(clock.time() - clock.monotonic() for _ in range(3))  # if preempted
        self._thread: int | None = None
        self._stack: list[Owner] = []
        self._step: int | None = None
        self._measures = {owner: _Measure(self, owner) for owner in Owner}
        now_s = self._offset_s + self._monotonic()
        self._start_s = self._since_s = now_s  # of the open span; of what is not booked yet
        self._seconds: defaultdict[Owner, float] = defaultdict(float)  # of the open span
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
            self._book()
            self._emit()
            self._step = step

    def measure(self, owner: Owner) -> AbstractContextManager[None]:
        """``with meter.measure(owner):`` the time inside is ``owner``'s, also when it raises."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        return self._measures[owner] if thread == self._thread else nullcontext()

    def take(self) -> dict[Owner, float]:
        """Seconds by owner since the last take, the open measure's up to now included."""
        with self._lock:
            self._book()
            self._emit()
            taken, self._taken = self._taken, {}
            return taken

    def cut(self) -> None:
        """Emit the open span up to now and go on with it. Safe in any thread."""
        with self._lock:
            self._book()
            self._emit()
            offset_s = self._clock.time() - self._monotonic()
            if offset_s - self._offset_s > _DRIFT_S:
                self._since_s += offset_s - self._offset_s
                self._start_s = self._since_s
                self._offset_s = offset_s

    def _enter(self, owner: Owner) -> None:
        with self._lock:
            if self._stack:
                self._book()
            else:
                self._resume()
            self._stack.append(owner)

    def _leave(self) -> None:
        with self._lock:
            self._book()
            self._stack.pop()

    def _book(self) -> None:
        """Give the time since the last booking to the innermost measure."""
        if self._stack:
            now_s = self._offset_s + self._monotonic()
            self._seconds[self._stack[-1]] += now_s - self._since_s
            self._since_s = now_s

    def _resume(self) -> None:
        """Measuring begins (again): after a gap that is worth a place of its own, in a new span."""
        now_s = self._offset_s + self._monotonic()
        if now_s - self._since_s > _GAP_S:
            self._emit()
        if not self._seconds:
            self._start_s = now_s
        self._since_s = now_s

    def _emit(self) -> None:
        """Close the open span, which ends where the last booking did."""
        if self._since_s > self._start_s and self._seconds:
            for owner, seconds in self._seconds.items():
                self._taken[owner] = self._taken.get(owner, 0.0) + seconds
            if self._sink is not None:
                self._sink.span(self._start_s, self._since_s, self._seconds, self._step)
        self._seconds = defaultdict(float)
        self._start_s = self._since_s
