"""What a sweep has spent, and whether that is all it may. Pure but for the clock.

A sweep pays for the part of a node that it reserves: a node's price times ``pool.cpus`` over the
node's CPUs, for as long as a seat on it is held. A node without a known price makes the sum partial
(it is never guessed); with ``max_dollars`` it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from ebbtide.platform.account import Dollars
from ebbtide.platform.clock import Clock

_US_PER_S = 1_000_000
_NEWS_S = 2.0


@dataclass(frozen=True)
class Limits:
    """What a sweep may spend, all its drivers together."""

    max_seconds: float | None = None
    max_dollars: Decimal | None = None

    def reached(self, seconds: float, usd: Decimal | None) -> str | None:
        """Which limit is reached, in words; None if there is something left."""
        if self.max_seconds is not None and seconds >= self.max_seconds:
            return f"max_seconds ({self.max_seconds:g} s) is spent"
        if self.max_dollars is not None and usd is not None and usd >= self.max_dollars:
            return f"max_dollars (${self.max_dollars:f}) is spent"
        return None


class Spending:
    """Adds up from tick to tick. ``seconds_before`` and ``usd_before``: of earlier drivers."""

    def __init__(
        self, clock: Clock, limits: Limits, seconds_before: float, usd_before: Decimal
    ) -> None:
        self._clock, self._limits = clock, limits
        self._began_s = self._last_s = clock.monotonic()
        self._seconds_before, self._usd_before = seconds_before, usd_before
        self._spent = Dollars()
        self._told_s = self._began_s

    def is_news(self) -> bool:
        """Whether it is time to write down what is spent."""
        if self._last_s - self._told_s < _NEWS_S:
            return False
        self._told_s = self._last_s
        return True

    @property
    def seconds(self) -> float:
        return self._seconds_before + self._clock.monotonic() - self._began_s

    @property
    def usd(self) -> Decimal | None:
        """Dollars so far; None if no price is known."""
        own = self._spent.usd
        return None if own is None else own + self._usd_before

    @property
    def own_usd(self) -> Decimal:
        """Of this driver alone; 0 where no price is known."""
        return self._spent.usd or Decimal(0)

    @property
    def partial(self) -> bool:
        return self._spent.partial

    def tick(self, usd_per_hour: Iterable[Decimal | None]) -> str | None:
        """Charge the time since the last tick at each held seat's price; the limit reached."""
        now_s = self._clock.monotonic()
        time_us = round((now_s - self._last_s) * _US_PER_S)
        self._last_s = now_s
        for price in usd_per_hour:
            self._spent += Dollars.of(time_us, price)
        return self._limits.reached(self.seconds, self.usd)
