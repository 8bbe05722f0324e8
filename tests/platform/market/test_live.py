"""A policy on a made-up cluster: what is asked for, when it gives up, and why it says so."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide.platform.market.baselines import Greedy, PricePause, Priority, SpotWithFallback
from ebbtide.platform.market.config import MarketConfig
from ebbtide.platform.market.live import (
    Decision,
    LiveMarket,
    Place,
    State,
    View,
    count,
    place_of,
)
from ebbtide.platform.market.policy import Policy, Terms
from ebbtide.platform.market.study import POLICIES
from ebbtide.platform.prices import Market

TICK_S, GIVE_UP_S, RETRY_S = 10.0, 30.0, 200.0
A, B = Place(Market.SPOT, "a"), Place(Market.SPOT, "b")
ON_DEMAND = Place(Market.ON_DEMAND)


def terms(work_s: float = 2000.0, deadline_s: float = 4000.0) -> Terms:
    return Terms(work_s, deadline_s, 20.0, TICK_S, ("a", "b"), nodes=2)


class World:
    """A cluster that gives what is asked for, where ``offers`` says so, one tick later."""

    def __init__(self, policy: Policy, offers: set[Place], **changes: float) -> None:
        self.offers = {*offers, ON_DEMAND}
        self.usd = {A: 1.0, B: 1.1}
        self.now_s, self.left_s = 0.0, terms(**changes).work_s
        self.running: Place | None = None
        self.has: set[Place] = set()
        self.reasons: list[str] = []
        self._market = LiveMarket(policy, GIVE_UP_S, RETRY_S)
        self._state: State = self._market.start(terms(**changes), 0.0)
        self.wanted: Place | None = None

    def tick(self, count: int = 1) -> Decision:
        for _ in range(count):
            self.has &= self.offers
            if self.running not in self.has:
                self.running = None
            decision, self._state = self._market.decide(self._state, self._view())
            if decision.reason is not None:
                self.reasons.append(decision.reason)
            self.wanted = decision.place
            if self.wanted in self.offers:
                self.has.add(self.wanted)
                self.running = self.wanted
            elif self.wanted is None:
                self.running = None
            if self.running is not None:
                self.left_s -= TICK_S
            self.has = {self.running} if self.running is not None else set()
            self.now_s += TICK_S
        return decision

    def until(self, place: Place) -> None:
        for _ in range(int(2 * RETRY_S / TICK_S)):
            if self.tick().place == place:
                return
        raise AssertionError(f"{place} was never wanted")

    def _view(self) -> View:
        return View(
            now_s=self.now_s,
            nodes=dict.fromkeys(self.has, 2),
            running=self.running,
            starting_s=0.0,
            work_left_s=self.left_s,
            spot_usd=(self.usd[A], self.usd[B]),
            on_demand_usd=3.0,
        )


def test_spot_that_vanishes_and_does_not_come_back_is_replaced_and_tried_again() -> None:
    world = World(Priority(), {A, B})
    assert world.tick() == Decision(A, "priority: spot a at $1 an hour, on-demand $3")
    assert world.tick(5) == Decision(A)

    world.offers -= {A}
    assert world.tick(2).place == B
    assert "spot was taken away in a" in world.reasons[-1]
    world.offers -= {B}
    assert world.tick(2).place == ON_DEMAND
    assert "spot was taken away in b; on-demand at $3 an hour" in world.reasons[-1]

    world.until(A)  # it is asked again, and on-demand goes on meanwhile
    assert world.running == ON_DEMAND
    assert "a may be asked for spot again" in world.reasons[-1]
    world.until(ON_DEMAND)
    assert world.running == ON_DEMAND
    assert any("a gave no spot in 30 s" in reason for reason in world.reasons)

    world.offers |= {A}
    world.until(A)
    world.tick()
    assert world.running == A


def test_a_fallback_that_counts_failures() -> None:
    world = World(SpotWithFallback(window_s=20 * TICK_S), set())
    world.tick(3)
    assert world.running is None  # the first zone is still waited for
    world.tick(12)
    assert world.running == ON_DEMAND
    world.offers |= {A, B}
    world.tick(60)
    assert world.running == A


def test_the_deadline_ends_the_waiting() -> None:
    world = World(Greedy(), set(), work_s=500.0, deadline_s=800.0)
    while world.running is None:
        world.tick()
    assert "the deadline leaves no time to wait" in world.reasons[-1]
    while world.left_s > 0:
        world.tick()
    assert world.now_s <= 800.0


def test_a_price_is_waited_for() -> None:
    world = World(PricePause(2.0), {A, B})
    world.tick()
    world.usd = {A: 2.5, B: 2.5}
    assert world.tick().place is None
    assert world.reasons[-1] == "price_pause: waiting is cheapest, and there is time"
    world.usd[B] = 1.5
    assert world.tick().place == B


@given(
    st.sampled_from([name for name in POLICIES if name != "spot_only"]),
    st.lists(st.sets(st.sampled_from([A, B])), min_size=1, max_size=20),
    st.integers(1, 9),
)
def test_no_policy_misses_a_deadline_that_on_demand_meets(
    name: str, weather: list[set[Place]], spell: int
) -> None:
    world = World(POLICIES[name], weather[0], work_s=300.0, deadline_s=450.0)
    ticks = 0
    while world.left_s > 0:
        world.offers = {*weather[ticks // spell % len(weather)], ON_DEMAND}
        world.tick()
        ticks += 1
        assert ticks <= 45


def test_the_state_is_a_value_that_can_be_taken_up_again() -> None:
    first = LiveMarket(Priority(), GIVE_UP_S, RETRY_S)
    view = View(0.0, {}, None, 0.0, 100.0, (1.0, 1.1), 3.0)
    _, state = first.decide(first.start(terms(), 0.0), view)
    later = replace(view, now_s=GIVE_UP_S)
    again = LiveMarket(Priority(), GIVE_UP_S, RETRY_S).decide(state, later)
    assert again == first.decide(state, later)
    assert again[0].place == B


def test_nodes_are_counted_by_what_they_are() -> None:
    assert place_of({}) is None
    assert place_of({"ebbtide.dev/market": "lease"}) is None
    on_demand = {**ON_DEMAND.labels, "ebbtide.dev/zone": "a"}
    assert place_of(on_demand) == ON_DEMAND
    assert count([A.labels, A.labels, B.labels, on_demand, {}]) == {A: 2, B: 1, ON_DEMAND: 1}
    assert (str(A), str(ON_DEMAND)) == ("spot a", "on-demand")
    anywhere = Place(Market.SPOT, "any")
    assert anywhere.labels == {"ebbtide.dev/market": "spot"}
    nodes = [A.labels, B.labels, anywhere.labels, on_demand]
    assert count(nodes, ["any"]) == {anywhere: 3, ON_DEMAND: 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "plans towards a deadline"),
        ({"policy": "tide"}, "plans towards a deadline"),
        ({"policy": "best"}, "known policies are tide, on_demand"),
        ({"policy": "price_pause"}, "belongs to policy: price_pause"),
        ({"policy": "priority", "pause_above_usd_per_hour": 1}, "belongs to policy: price_pause"),
        ({"policy": "priority", "zones": ["a", "a"]}, "names a zone twice"),
        ({"policy": "priority", "zones": ["a", "any"]}, "any stands alone"),
        ({"policy": "priority", "zones": []}, "at least 1 item"),
        ({"policy": "priority", "retry_s": 60}, "would not be up before the zone is tried"),
        ({"policy": "priority", "give_up_s": 0}, "greater than 0"),
        ({"deadline": 17}, "must be a time with its zone"),
    ],
)
def test_a_market_that_cannot_work_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MarketConfig.model_validate({"zones": ["a"], **values})


def test_a_job_gets_the_simulators_own_policy() -> None:
    later = datetime(2031, 1, 1, tzinfo=UTC)
    assert MarketConfig(zones=("a",), deadline=later).chosen() is POLICIES["tide"]
    paused = MarketConfig(zones=("a",), policy="price_pause", pause_above_usd_per_hour=2.0)
    assert paused.chosen() == PricePause(2.0)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("deadline_s", [0.0, 1.0, 10 * 365 * 86400.0])
def test_a_deadline_that_has_passed_or_is_far_away_stops_no_policy(
    name: str, deadline_s: float
) -> None:
    world = World(POLICIES[name], {A}, work_s=100.0, deadline_s=deadline_s)
    world.tick(5)
    if deadline_s < 10 and name != "spot_only":
        assert world.running is not None
