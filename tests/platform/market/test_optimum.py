from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.market.optimum import optimum_usd
from ebbtide.platform.market.policy import Terms
from ebbtide.platform.market.simulator import Window, simulate
from ebbtide.platform.market.study import POLICIES
from ebbtide.platform.market.traces import Trace
from tests.platform.market.markets import ON_DEMAND_USD, SPOT_USD, TICK_S, terms, window

TICKS = 9
markets = st.lists(st.text("#.", min_size=TICKS, max_size=TICKS), min_size=1, max_size=3)


def by_trying_all(job: Terms, market: Window) -> float:
    """The least cost over every sequence of placements, by the simulator's rules."""
    delay, ticks = round(job.restart_s / TICK_S), round(job.deadline_s / TICK_S)
    prices = market.spot_usd()

    @cache
    def least(tick: int, running: int, starting: int, left: int) -> float:
        if left == 0:
            return 0.0
        if tick == ticks:
            return math.inf
        costs = [least(tick + 1, -1, 0, left)]
        for wanted in range(len(market.zones) + 1):  # the last is on-demand
            spot = wanted < len(market.zones)
            if spot and not market.zones[wanted].nodes[tick] >= job.nodes:
                continue
            waits = starting if wanted == running else delay
            price = prices[tick][wanted] if spot else market.on_demand_usd_per_hour
            then = least(tick + 1, wanted, max(0, waits - 1), left - (waits == 0))
            costs.append(then + price * job.nodes * TICK_S / 3600)
        return min(costs)

    return least(0, -1, 0, round(job.work_s / TICK_S))


@settings(max_examples=60)
@given(zones=markets, work=st.integers(1, TICKS), delay=st.integers(0, 3), data=st.data())
def test_it_is_the_least_of_all_ways(
    zones: list[str], work: int, delay: int, data: st.DataObject
) -> None:
    job = terms(work, TICKS, delay, len(zones))
    market = window(*zones)
    if data.draw(st.booleans(), "priced"):
        draw = np.random.default_rng(data.draw(st.integers(0, 99)))
        priced = tuple(
            Trace(zone.zone, TICK_S, zone.nodes, draw.uniform(0.5, 4, TICKS))
            for zone in market.zones
        )
        market = Window(priced, ON_DEMAND_USD, SPOT_USD)
    assert optimum_usd(job, [market]) == [pytest.approx(by_trying_all(job, market))]


@settings(max_examples=30)
@given(zones=markets, work=st.integers(1, TICKS - 2))
def test_no_policy_is_cheaper(zones: list[str], work: int) -> None:
    job, market = terms(work, TICKS, 1, len(zones)), window(*zones)
    least = optimum_usd(job, [market])[0]
    for policy in POLICIES.values():
        outcome = simulate(policy, job, market)
        assert outcome.finished_s is None or outcome.usd >= least - 1e-9, policy.name


def test_the_last_tick_of_work_is_paid_to_its_end() -> None:
    job = Terms(2.25 * TICK_S, 5 * TICK_S, TICK_S, TICK_S, ("a",))
    assert optimum_usd(job, [window("#####")]) == [
        pytest.approx(3.25 * TICK_S / 3600 * SPOT_USD),
    ]
    assert optimum_usd(job, [window(".....")]) == [
        pytest.approx(3.25 * TICK_S / 3600 * ON_DEMAND_USD),
    ]


def test_windows_are_solved_together_as_alone() -> None:
    job = terms(4, TICKS, 2, 2)
    many = [window("#########", "........."), window("..####...", "#..##...#")]
    assert optimum_usd(job, many) == [optimum_usd(job, [one])[0] for one in many]


def test_more_work_than_time_costs_infinitely_much() -> None:
    assert optimum_usd(terms(10, TICKS), [window("#" * TICKS)]) == [math.inf]
    assert optimum_usd(terms(TICKS, TICKS, restart=1), [window("#" * TICKS)]) == [math.inf]
    assert optimum_usd(terms(1, TICKS), []) == []
