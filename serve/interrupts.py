"""Ctrl-C and SIGTERM while an endpoint starts, serves and ends.

A handler that raises wherever the program happens to be can do so inside of Ray, which swallows the
exception or is left half started. Promises: within the context of :class:`Interrupts` a signal
raises only where the code allows it (:meth:`Interrupts.raising`, :meth:`Interrupts.check`); none is
lost, not even one whose exception was swallowed; and only the first raises by itself, so that a
second Ctrl-C does not cut short the cleaning up that the first has begun.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from ebbtide.platform import signals


class Interrupts:
    """A context; outside of the main thread it does nothing, as signals do not arrive there.

    ``may_raise``: whether the first signal raises at once, or at the next check.
    """

    def __init__(self) -> None:
        self.may_raise = False
        self._noted: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in signals.NUMBERS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT has arrived, SystemExit (143) for a SIGTERM."""
        if self._noted:
            raise signals.arrived(self._noted[0])

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A stretch in which a signal raises at once, as what is done there can be cut short."""
        before, self.may_raise = self.may_raise, True
        try:
            self.check()
            yield
        finally:
            self.may_raise = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self.may_raise and len(self._noted) == 1:
            self.check()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Signals to this thread wait in the kernel, for calls that start threads or put handlers of
    native code in place of ours. One to the whole process may still reach another thread, which
    hands it to whatever handler is there.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
