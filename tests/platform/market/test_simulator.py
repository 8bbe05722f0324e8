from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ebbtide.platform.market.baselines import Greedy, OnDemand, Priority, SpotOnly
from ebbtide.platform.market.policy import IDLE, Placement, Seen, Terms
from ebbtide.platform.market.simulator import Window, simulate, whole_ticks
from ebbtide.platform.prices import Market
from tests.platform.market.markets import ON_DEMAND_USD, SPOT_USD, TICK_S, terms, window, zone

HOUR = TICK_S / 3600
SPOT = [Placement(1, Market.SPOT, 0), Placement(1, Market.SPOT, 1)]


@dataclass(frozen=True)
class Script:
    """Wants one placement a tick, in order."""

    wants: tuple[Placement, ...]
    name: str = "script"

    def start(self, terms: Terms) -> int:
        return 0

    def decide(self, memory: int, seen: Seen) -> tuple[Placement, int]:
        return self.wants[min(memory, len(self.wants) - 1)], memory + 1


def test_on_demand_pays_the_start_and_the_work() -> None:
    outcome = simulate(OnDemand(), terms(work=5, deadline=9, restart=2), window("." * 9))
    assert outcome.usd == pytest.approx(7 * HOUR * ON_DEMAND_USD)
    assert outcome.finished_s == 7 * TICK_S
    assert (outcome.starts, outcome.evictions) == (1, 0)
    assert outcome.hours == {Market.ON_DEMAND: pytest.approx(7 * HOUR)}


def test_a_job_that_ends_within_a_tick_pays_to_its_end() -> None:
    job = Terms(1.5 * TICK_S, 4 * TICK_S, TICK_S, TICK_S, ("a",))
    outcome = simulate(OnDemand(), job, window("...."))
    assert outcome.usd == pytest.approx(2.5 * HOUR * ON_DEMAND_USD)
    assert outcome.finished_s == 2.5 * TICK_S


def test_an_eviction_costs_the_start_again_and_no_tick_without_nodes() -> None:
    outcome = simulate(SpotOnly(), terms(work=4, deadline=9), window("###..####"))
    assert outcome.finished_s == 8 * TICK_S  # start, 2 of work, gone for 2, start, 2 of work
    assert outcome.usd == pytest.approx(6 * HOUR * SPOT_USD)
    assert (outcome.starts, outcome.evictions) == (2, 1)


def test_a_missed_deadline_has_no_finish() -> None:
    outcome = simulate(SpotOnly(), terms(work=4, deadline=6), window("##...."))
    assert outcome.finished_s is None
    assert outcome.usd == pytest.approx(2 * HOUR * SPOT_USD)


def test_moving_to_another_zone_is_a_start() -> None:
    policy = Script((SPOT[0], SPOT[0], SPOT[1]))
    outcome = simulate(policy, terms(2, 9, zones=2), window("#" * 9, "#" * 9), keep=True)
    assert outcome.starts == 2
    assert outcome.finished_s == 4 * TICK_S
    assert outcome.placements == (SPOT[0], SPOT[0], SPOT[1], SPOT[1])


def test_what_the_market_does_not_offer_is_not_got() -> None:
    outcome = simulate(Script((SPOT[0],)), terms(2, 5), window(".####"), keep=True)
    assert outcome.placements[0] == IDLE
    assert outcome.usd == pytest.approx(3 * HOUR * SPOT_USD)


def test_a_gang_runs_with_all_its_nodes_or_not_at_all() -> None:
    traces = (zone("#####", nodes=3),)
    short = Window(traces, ON_DEMAND_USD, SPOT_USD)
    assert simulate(SpotOnly(), terms(2, 5, nodes=4), short).usd == 0
    enough = simulate(SpotOnly(), terms(2, 5, nodes=3), short)
    assert enough.usd == pytest.approx(3 * 3 * HOUR * SPOT_USD)


def test_on_prem_nodes_come_first_where_there_are_any() -> None:
    owned = Window((zone("####"),), ON_DEMAND_USD, SPOT_USD, 1, 0.5)
    outcome = simulate(Priority(), terms(2, 4), owned)
    assert outcome.hours == {Market.ON_PREM: pytest.approx(3 * HOUR)}
    assert outcome.usd == pytest.approx(3 * HOUR * 0.5)


def test_a_policy_is_told_of_its_eviction_once() -> None:
    told: list[bool] = []

    class Watch(Greedy):
        def decide(self, memory: Any, seen: Seen) -> tuple[Placement, Any]:
            told.append(seen.evicted)
            return super().decide(memory, seen)

    simulate(Watch(), terms(3, 9), window("##.#####."))
    assert told == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("seconds", "ticks"), [(0, 0), (1, 1), (540, 2), (541, 2), (780, 2), (720, 2)]
)
def test_a_delay_is_the_nearest_number_of_ticks_but_never_lost(seconds: float, ticks: int) -> None:
    assert whole_ticks(seconds, TICK_S) == ticks
