"""Time behind one Protocol, so that whatever measures or waits can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time, monotonic time and sleep, all in seconds."""

    def time(self) -> float:
        """Seconds since the epoch; may jump. For timestamps that people or other machines read."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back. For durations on one machine."""

    def sleep(self, seconds: float) -> None:
        """Wait; a negative duration returns at once."""


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class FakeClock:
    """A clock that moves only when told to (or when someone sleeps on it)."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)
