"""What every policy promises, ``tide`` included, and what each rule does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.market.baselines import (
    LeaveZone,
    PricePause,
    Priority,
    SpotWithFallback,
    UniformProgress,
)
from ebbtide.platform.market.policy import IDLE, Placement, Policy, Seen
from ebbtide.platform.market.simulator import Window, simulate
from ebbtide.platform.market.study import POLICIES
from ebbtide.platform.market.traces import Trace
from ebbtide.platform.prices import Market
from tests.platform.market.markets import ON_DEMAND_USD, SPOT_USD, TICK_S, terms, window, zone

LONG = 40
ON_DEMAND = Placement(1, Market.ON_DEMAND)
guarded = pytest.mark.parametrize(
    "policy", [p for p in POLICIES.values() if p.name != "spot_only"], ids=lambda p: p.name
)
every = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=lambda p: p.name)
spells = st.lists(st.tuples(st.booleans(), st.integers(1, 15)), min_size=1, max_size=12)


@st.composite
def series(draw: st.DrawFn) -> str:
    """A zone of ``LONG`` ticks with spells of some length."""
    text = "".join("#."[up] * length for up, length in draw(spells))
    return (text * LONG)[:LONG]


zones = st.lists(series(), min_size=1, max_size=3)


@guarded
@settings(max_examples=25)
@given(market=zones, delay=st.integers(0, 4), spare=st.integers(0, 12), nodes=st.integers(1, 4))
def test_a_deadline_that_on_demand_can_meet_is_met(
    policy: Policy, market: list[str], delay: int, spare: int, nodes: int
) -> None:
    job = terms(LONG - delay - spare, LONG, delay, len(market), nodes)
    assert simulate(policy, job, window(*market, nodes=nodes)).finished_s is not None


@every
@settings(max_examples=15)
@given(market=zones, other=zones, cut=st.integers(1, LONG - 1))
def test_decisions_do_not_depend_on_the_future(
    policy: Policy, market: list[str], other: list[str], cut: int
) -> None:
    changed = [text[:cut] + other[index % len(other)][cut:] for index, text in enumerate(market)]
    job = terms(28, LONG, 2, len(market))
    first = simulate(policy, job, window(*market), keep=True)
    second = simulate(policy, job, window(*changed), keep=True)
    assert first.placements[:cut] == second.placements[:cut]


@every
def test_a_decision_can_be_repeated(policy: Policy) -> None:
    job = replace(terms(20, LONG, 2, 2), history=(b"\1\1\0\1" * 50, b"\0\1\1\0" * 50))
    memory = policy.start(job)
    for tick in range(12):
        offered = (tick % 3 > 0, tick % 4 == 0)
        seen = Seen(tick * TICK_S, 20 * TICK_S, IDLE, 0.0, offered, (1.0, 1.0), 3.0)
        answer, after = policy.decide(memory, seen)
        assert policy.decide(memory, seen)[0] == answer
        memory = after


def placements(policy: Policy, work: int, *market: str, deadline: int = 0) -> str:
    """What ran tick by tick: a zone's letter, ``$`` for on-demand, ``-`` for nothing."""
    job = terms(work, deadline or len(market[0]), 1, len(market))
    outcome = simulate(policy, job, window(*market), keep=True)
    return "".join(
        "-" if not p.nodes else "$" if p.zone is None else chr(97 + p.zone)
        for p in outcome.placements
    )


def test_fallback_goes_on_demand_when_spot_fails_and_back_when_it_recovers() -> None:
    policy = SpotWithFallback(threshold=0.3, window_s=10 * TICK_S)
    market = "##########....##########" + "#" * 20
    ran = placements(policy, 20, market)
    assert ran.startswith("aaaaaaaaaa---$")  # 4 of 10 ticks failed: more than 30%
    back = ran.index("a", 14)
    assert set(ran[13:back]) == {"$"}
    assert set(ran[back:]) == {"a"}


def test_a_zone_that_evicts_too_often_is_left_and_avoided() -> None:
    policy = LeaveZone(evictions_per_hour=0.5, window_s=10 * TICK_S)
    assert placements(policy, 8, "####.###########", "################") == "aaaabbbbbb"
    assert placements(policy, 8, "####.###########", "................")[4:8] == "$$$$"


def test_the_job_waits_while_spot_is_dear() -> None:
    prices = [1.0] * 4 + [2.0] * 4 + [1.0] * 12
    trace = Trace("a", TICK_S, zone("#" * 20).nodes, np.array(prices))
    outcome = simulate(
        PricePause(1.5), terms(8, 20), Window((trace,), ON_DEMAND_USD, SPOT_USD), keep=True
    )
    assert [p.nodes for p in outcome.placements] == [1] * 4 + [0] * 4 + [1] * 6


def test_priority_never_waits() -> None:
    assert placements(Priority(), 9, "##..####......") == "aa$$aaaa$$$$$"


def test_uniform_progress_buys_on_demand_only_when_it_is_behind() -> None:
    ran = placements(UniformProgress(), 10, "." * 20)
    assert ran[0] == "-"  # at the start nothing is behind
    assert "$" in ran[1:4]
    assert ran.count("$") >= 11
    late = placements(UniformProgress(), 10, "." * 8 + "#" * 12)
    assert late.index("a") < 12
    stays = placements(UniformProgress(stay=True), 10, "." * 20)
    assert stays.count("-$") <= ran.count("-$")


def test_uniform_progress_lets_the_tick_of_an_eviction_pass() -> None:
    ran = placements(UniformProgress(), 10, "####.#########################")
    assert ran[4] == "-"
    assert ran[5] == "a"
