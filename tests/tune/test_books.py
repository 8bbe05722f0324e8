"""A sweep's ledger: its seats, what they did, what its trials cost."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from ebbtide.platform.account import account
from ebbtide.platform.clock import FakeClock
from ebbtide.platform.ledger import NodeUp, Owner, read_ledger
from ebbtide.platform.prices import Market
from ebbtide.platform.storage import open_storage
from ebbtide.tune.books import Books

T = 1_700_000_000.0


def seat(usd_per_hour: str | None) -> NodeUp:
    price = None if usd_per_hour is None else Decimal(usd_per_hour)
    return NodeUp(
        node_id="0123456789abcdef",
        time_s=0,
        instance_type="box",
        market=Market.SPOT,
        usd_per_hour=price,
        usd_per_hour_on_demand=price,
    )


def test_every_second_of_a_seat_is_a_trials_or_idle(tmp_path: Path) -> None:
    clock, storage = FakeClock(T), open_storage(str(tmp_path))
    with Books(storage, clock, attempt=1) as books:
        books.hold({"evaluator-0": seat("3.6")})
        clock.sleep(10)
        books.ran("evaluator-0", 10)
        books.ended(1, "finished", 10, Decimal("0.01"), saved_s=4)
        books.hold({"evaluator-0": seat("3.6"), "evaluator-1": seat("7.2")})
        clock.sleep(20)
        books.ran("evaluator-1", 15)
        books.ran("evaluator-2", 15)  # is not held
        books.status = "finished"
    found = account(read_ledger(storage).records, clock.time())
    assert found.status == "finished"
    assert found.total.seconds == 50 and found.total.spent.usd == Decimal("0.07")
    assert found.by_owner[Owner.COMPUTE].seconds == 25
    assert found.by_owner[Owner.IDLE].seconds + found.by_owner[Owner.RESTART].seconds == 25
    assert found.startup_saved_s == 4 and found.trials[0].usd == Decimal("0.01")


def test_a_seat_of_unknown_price_makes_the_sum_partial(tmp_path: Path) -> None:
    clock, storage = FakeClock(T), open_storage(str(tmp_path))
    with Books(storage, clock, attempt=1) as books:
        books.hold({"evaluator-0": seat(None)})
        clock.sleep(10)
    found = account(read_ledger(storage).records, clock.time())
    assert found.total.spent.usd is None and found.total.spent.partial
    assert found.status == "interrupted"
