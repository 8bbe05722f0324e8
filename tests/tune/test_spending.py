"""What a sweep spends, and where it ends."""

from __future__ import annotations

from decimal import Decimal

from ebbtide.platform.clock import FakeClock
from ebbtide.tune.spending import Limits, Spending


def test_seats_are_charged_for_the_time_they_are_held() -> None:
    clock = FakeClock()
    limits = Limits(max_seconds=1000, max_dollars=Decimal("3.5"))
    spending = Spending(clock, limits, seconds_before=100, usd_before=Decimal("0.5"))
    clock.sleep(360)
    assert spending.tick([Decimal(10), Decimal(2)]) is None  # a tenth of an hour
    assert (spending.usd, spending.own_usd) == (Decimal("1.7"), Decimal("1.2"))
    assert spending.seconds == 460
    clock.sleep(180)
    assert spending.tick([Decimal(40)]) == "max_dollars ($3.5) is spent"
    assert not spending.partial
    spending.tick([None])
    assert not spending.partial  # no time has passed
    clock.sleep(360)
    assert spending.tick([None]) == "max_seconds (1000 s) is spent"
    assert spending.partial and spending.usd == Decimal("3.7")


def test_without_a_price_nothing_is_guessed() -> None:
    clock = FakeClock()
    spending = Spending(clock, Limits(max_dollars=Decimal(1)), 0, Decimal(0))
    clock.sleep(3600)
    assert spending.tick([None]) is None and spending.usd is None and spending.own_usd == 0
