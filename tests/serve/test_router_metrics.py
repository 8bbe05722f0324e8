"""What serving costs, by the seconds of its replicas."""

from __future__ import annotations

from decimal import Decimal

import pytest

from ebbtide.serve.config import Role
from ebbtide.serve.fleet import GIVEN_UP_S, Beat, Fleet
from ebbtide.serve.router_metrics import RouterMetrics

PRICES: dict[Role, Decimal | None] = {"prefill": Decimal("3.60"), "decode": Decimal("7.20")}


def told(metrics: RouterMetrics, fleet: Fleet) -> dict[str, float]:
    lines = metrics.text(fleet, 0.0).decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def lived(*workers: tuple[str, Role, int]) -> Fleet:
    fleet = Fleet()
    for name, role, seconds in workers:
        for half in range(2 * seconds + 1):
            fleet.beat(Beat(name, role, f"http://{name}", 100), half / 2)
    return fleet


def test_cost_is_replica_seconds_times_price() -> None:
    fleet = lived(("a", "prefill", 100), ("b", "decode", 100), ("c", "decode", 50))
    counted = RouterMetrics(PRICES)
    counted.count_tokens("alice", 300, 100)
    metrics = told(counted, fleet)
    assert metrics['ebbtide_replica_seconds{role="decode"}'] == 150
    assert metrics['ebbtide_cost_usd{of="all"}'] == pytest.approx(0.10 + 0.30)
    assert metrics['ebbtide_cost_usd{of="per_million_tokens"}'] == pytest.approx(1000)


def test_a_worker_that_is_silent_for_long_does_not_count_meanwhile() -> None:
    fleet = lived(("a", "decode", 10))
    fleet.beat(Beat("a", "decode", "http://a", 100), 10 + GIVEN_UP_S + 100)
    fleet.beat(Beat("a", "decode", "http://a", 100), 10 + GIVEN_UP_S + 101)
    assert fleet.replica_s["decode"] == 11


def test_without_a_price_the_cost_is_unknown_and_not_zero() -> None:
    fleet = lived(("a", "prefill", 10), ("b", "decode", 10))
    found = told(RouterMetrics({"prefill": None, "decode": Decimal(1)}), fleet)
    assert not any(name.startswith("ebbtide_cost_usd") for name in found)
    only = lived(("b", "decode", 3600))
    assert told(RouterMetrics({"decode": Decimal(1)}), only)['ebbtide_cost_usd{of="all"}'] == 1
