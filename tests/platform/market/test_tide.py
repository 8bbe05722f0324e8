from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ebbtide.platform.market.chain import GRADES, NONE, STATES, Chain, learn
from ebbtide.platform.market.hazard import (
    PRIOR_PER_HOUR,
    Spells,
    ages_s,
    draw_series,
    unchanged,
)
from ebbtide.platform.market.plan import ON_DEMAND, SPOT, WAIT, solve
from ebbtide.platform.market.simulator import Window, simulate
from ebbtide.platform.market.study import POLICIES, Job, draw_windows
from ebbtide.platform.market.tide import Tide
from ebbtide.platform.market.traces import Trace
from ebbtide.platform.prices import Market
from tests.platform.market.markets import TICK_S, terms, window

BASELINES = ("on_demand", "greedy", "spot_with_fallback", "leave_zone", "uniform_progress",
             "uniform_progress_stay", "priority")  # fmt: skip


def series(text: str) -> np.ndarray:
    return np.array([mark == "#" for mark in text], dtype=np.uint8)


def test_the_age_of_a_spell_begins_with_it() -> None:
    assert ages_s(series("##...#"), 10).tolist() == [0, 10, 0, 10, 20, 0]


def test_hours_and_changes_are_counted_by_state_and_age() -> None:
    spells = Spells.of(series("####...#"), 600.0)  # the last tick's future is not known
    assert spells.hours.sum() == pytest.approx(7 * 600 / 3600)
    assert spells.hours[1].sum() == pytest.approx(4 * 600 / 3600)
    assert spells.changes.sum(axis=1).tolist() == [1, 1]


def test_a_zone_that_nothing_is_known_of_has_the_priors_hazards() -> None:
    nothing = Spells.of(np.zeros(0, dtype=np.uint8), 600.0)
    assert nothing.per_hour() == pytest.approx(PRIOR_PER_HOUR)


def test_hazards_are_learnt_from_a_long_past() -> None:
    truth = np.array([[0.5] * 8, [0.1] * 8])
    past = draw_series(truth, 200.0, 200_000, np.random.default_rng(1))
    learnt = Spells.of(past, 200.0).per_hour()
    assert learnt[0][2:6] == pytest.approx([0.5] * 4, rel=0.25)
    assert learnt[1][3:] == pytest.approx([0.1] * 5, rel=0.25)


def test_a_history_is_doubted_when_the_zone_behaves_otherwise() -> None:
    draw = np.random.default_rng(2)
    calm, wild = (np.full((2, 8), rate) for rate in (0.1, 2.0))
    before, same, other = (
        Spells.of(draw_series(rates, 200.0, ticks, draw), 200.0)
        for rates, ticks in ((calm, 5000), (calm, 1000), (wild, 1000))
    )
    assert unchanged(before, same) > 0.5
    assert unchanged(before, other) < 0.01


def test_zones_that_fail_together_are_known_to() -> None:
    draw = np.random.default_rng(3)
    rates = np.full((2, 8), 0.5)
    one, two = (draw_series(rates, 200.0, 20_000, draw) for _ in range(2))
    nothing = [np.zeros(0, dtype=np.uint8)] * 2

    def none_after_eviction(zones: list[np.ndarray]) -> float:
        chain, _ = learn(zones, nothing, np.ones(2), 200.0, 2, 0.2)
        return float((chain.after[:, :NONE].sum(axis=1) * chain.eviction).sum())

    assert none_after_eviction([one, one]) > 1.5 * none_after_eviction([one, two])


def chain(comes: float, goes: float) -> Chain:
    """One kind of zone: without spot it comes back, with spot it goes, by these chances a step."""
    market = np.zeros((STATES, STATES))
    market[:NONE, NONE] = comes
    market[:NONE, 0] += 1 - comes
    market[NONE:, 0] = goes
    market[NONE:, NONE] += 1 - goes
    after = np.zeros((GRADES, STATES))
    after[:, 0] = 1.0
    eviction = np.full(GRADES, goes)
    return Chain(market, np.eye(GRADES), eviction, after, np.ones(GRADES))


def test_a_plan_waits_for_spot_that_comes_soon_and_buys_where_it_does_not() -> None:
    soon, rarely = (solve(chain(comes, 0.05), 3.0, 2, 90, 20) for comes in (0.5, 0.1))
    assert soon.at(soon.idle, 0, work_steps=60, slack_steps=10) == WAIT
    assert rarely.at(rarely.idle, 0, work_steps=60, slack_steps=10) == ON_DEMAND
    assert soon.at(soon.idle, NONE, work_steps=60, slack_steps=10) == SPOT


def test_a_plan_buys_in_the_last_moment_whatever_may_come() -> None:
    plan = solve(chain(0.9, 0.01), 3.0, 2, 60, 20)
    assert plan.at(plan.idle, 0, work_steps=40, slack_steps=2) == ON_DEMAND
    assert plan.at(plan.on_demand, 0, work_steps=40, slack_steps=0) == ON_DEMAND


def test_spot_that_goes_at_once_is_not_worth_leaving_on_demand_for() -> None:
    flighty, lasting = (solve(chain(0.05, goes), 3.0, 2, 80, 20) for goes in (0.5, 0.01))
    assert flighty.at(flighty.on_demand, NONE, 60, 20) == ON_DEMAND
    assert lasting.at(lasting.on_demand, NONE, 60, 20) == SPOT


def test_the_better_zone_is_chosen() -> None:
    """Zone a is lost every few ticks; b lasts. Both are on offer at the start."""
    bad, good = b"\1\1\1\0\0" * 400, b"\1" * 900 + b"\0" * 100 + b"\1" * 1000
    job = replace(terms(20, 60, 2, 2), history=(bad, good))
    outcome = simulate(Tide(), job, window("###.." * 12, "#" * 60), keep=True)
    assert {placed.zone for placed in outcome.placements} == {1}
    assert outcome.starts == 1


def test_a_cheaper_zone_is_chosen_among_equals() -> None:
    flat = np.ones(60, dtype=np.int64)
    dear, cheap = (
        Trace(name, TICK_S, flat, np.full(60, usd)) for name, usd in (("a", 1.4), ("b", 0.9))
    )
    market = Window((dear, cheap), 3.0, 1.0)
    outcome = simulate(Tide(), terms(20, 60, 2, 2), market, keep=True)
    assert {placed.zone for placed in outcome.placements} == {1}


def test_it_goes_on_demand_where_spot_never_comes() -> None:
    outcome = simulate(Tide(), terms(20, 60, 2), window("." * 60))
    assert outcome.hours.keys() == {Market.ON_DEMAND}
    assert outcome.finished_s is not None
    assert outcome.starts == 1


def test_a_job_without_spot_zones_runs_on_demand() -> None:
    job = replace(terms(3, 9), zones=())
    assert Tide().start(job).seen == ()


def test_it_pays_no_more_than_any_fixed_rule_where_the_market_goes_on_as_it_was() -> None:
    rates = np.stack([np.full(8, 1 / 2.0), np.full(8, 1 / 3.0)])
    nodes = draw_series(rates, 195.0, 20_000, np.random.default_rng(4)).astype(np.int64)
    job = Job(24 * 3600, 30 * 3600, 780, 3.0, 1.0)
    study = draw_windows(job, (Trace("a", 195.0, nodes),), 20, np.random.default_rng(5))
    least = study.optimum()
    paid = {
        name: float(np.mean(study.run(POLICIES[name], least).over_optimum))
        for name in ("tide", *BASELINES)
    }
    assert paid["tide"] <= min(paid[name] for name in BASELINES)


def test_a_job_of_a_month_is_planned_too() -> None:
    """In steps longer than its restart, which still counts: it does not move at every chance."""
    hours = 24 * 30
    job = replace(
        terms(8 * hours, 10 * hours, 1), history=(draw_series(
            PRIOR_PER_HOUR, TICK_S, 2000, np.random.default_rng(6)
        ).tobytes(),)
    )  # fmt: skip
    nodes = draw_series(PRIOR_PER_HOUR, TICK_S, 10 * hours, np.random.default_rng(7))
    market = Window((Trace("a", TICK_S, nodes.astype(np.int64)),), 3.0, 1.0)
    outcome = simulate(Tide(), job, market)
    assert outcome.finished_s is not None
    assert outcome.starts <= 2 * outcome.evictions + 2
