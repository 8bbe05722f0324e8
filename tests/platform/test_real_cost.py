"""What is paid beside the nodes, to the last digit."""

from __future__ import annotations

from decimal import Decimal

from ebbtide.platform.account import Account, Dollars, Row, Total
from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.real_cost import HOURS_PER_MONTH, Rates, real_cost
from ebbtide.platform.records import NodeUp, Transfer


def of(usd_per_hour: Decimal | None) -> Account:
    """One node for an hour, and 2 GB of egress at $0.09."""
    node = NodeUp(
        node_id="a",
        time_s=0.0,
        instance_type="box",
        market=Market.ON_PREM,
        usd_per_hour=usd_per_hour,
        usd_per_hour_on_demand=None,
    )
    time_us = 3_600_000_000
    total = Total(time_us, Dollars.of(time_us, usd_per_hour), Dollars.of(time_us, None))
    moved = Transfer(time_s=1.0, attempt=0, size_bytes=2 * 10**9, usd_per_gb=Decimal("0.09"))
    return Account((Row(node, 0, Owner.COMPUTE, 0, total),), "finished", {}, frozenset({moved}))


def test_every_part_and_their_sum() -> None:
    rates = Rates(Decimal("0.20"), Decimal("0.023"), Decimal(90), Decimal("1.5"))
    month_s = HOURS_PER_MONTH * 3600.0
    found = real_cost(of(Decimal(10)), rates, 100 * 10**9, 2 * month_s)
    assert [found.nodes, found.egress, found.network] == [10, Decimal("0.18"), 2]
    assert [found.storage, found.engineering] == [Decimal("4.6"), 135]
    assert found.total == Decimal("151.78")
    assert rates.given and not Rates().given


def test_nodes_without_a_price_leave_the_sum_unknown() -> None:
    found = real_cost(of(None), Rates(Decimal("0.2")), 0, 0.0)
    assert found.nodes is None
    assert found.total is None
    assert not found.network
