from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

from ebbtide.platform.budget import BudgetConfig
from ebbtide.train.events import Checkpoint, Failed, GenerationBegan, Left, Step
from ebbtide.train.spending import Act, Before, Guard
from tests.train.test_bookkeeping import step

RATE = Decimal("3.60")


def began(attempt: int, time_s: float) -> GenerationBegan:
    return GenerationBegan(time_s=time_s, attempt=attempt, world_size=1, nodes=("n",))


def usd(time_s: float) -> Decimal:
    """One node at $0.001 a second, from 0 on."""
    return RATE * Decimal(time_s) / 3600


def guard(limits: BudgetConfig, before: Before | None = None, first_step: int = 0) -> Guard:
    return Guard(limits, 100, 0.0, before or Before(0.0), first_step, Fraction(10))


def test_at_the_limit_the_ranks_are_asked_to_leave_and_then_the_run_ends() -> None:
    of_a_dollar = guard(BudgetConfig(max_dollars_per_run=Decimal("0.1")))
    of_a_dollar.follow([began(0, 10.0), *(step(n, 0, 20.0 + n) for n in range(1, 40))], usd)
    early = of_a_dollar.decide(of_a_dollar.books(59.0, usd(59.0), RATE))
    assert [each.key for each in early.cautions] == ["budget.max_dollars_per_run projected"]
    late = of_a_dollar.decide(of_a_dollar.books(85.0, usd(85.0), RATE))
    assert (late.leave, [each.key for each in late.cautions]) == (
        None,
        ["budget.max_dollars_per_run 80%"],  # and the other one is not said again
    )
    asked = of_a_dollar.decide(of_a_dollar.books(96.0, usd(96.0), RATE))
    assert (asked.leave, asked.end) == (0, False)
    of_a_dollar.follow([step(40, 0, 96.5), Left(time_s=97.0, attempt=0, step=40)], usd)
    ended = of_a_dollar.decide(of_a_dollar.books(97.0, usd(97.0), RATE))
    assert (ended.leave, ended.end) == (None, True)
    assert ended.reason == "$0.0960 of budget.max_dollars_per_run $0.1000 are spent"
    assert of_a_dollar.saved_step == 40


def test_ranks_that_do_not_leave_do_not_hold_the_run_for_ever() -> None:
    stuck = guard(BudgetConfig(max_dollars_per_run=Decimal("0.1")))
    stuck.follow([began(0, 10.0), Checkpoint(time_s=50.0, attempt=0, step=7, uri="x")], usd)
    for now_s, end in ((97.0, False), (150.0, False), (170.0, True)):
        assert stuck.decide(stuck.books(now_s, usd(now_s), RATE)).end is end
    assert stuck.saved_step == 7


def test_a_run_that_fails_or_has_no_ranks_at_its_limit_ends_at_once() -> None:
    lost = guard(BudgetConfig(max_dollars_per_run=Decimal("0.1")))
    assert lost.decide(lost.books(97.0, usd(97.0), RATE)).end
    failed = guard(BudgetConfig(max_dollars_per_run=Decimal("0.1")))
    death = Failed(time_s=90.0, attempt=0, cause="node lost", message="", counted=False)
    failed.follow([began(0, 10.0), death], usd)
    assert failed.decide(failed.books(97.0, usd(97.0), RATE)).end


def test_a_run_that_reached_its_last_step_is_left_to_finish() -> None:
    done = guard(BudgetConfig(max_dollars_per_run=Decimal("0.1")), first_step=99)
    done.follow([began(0, 10.0), step(100, 0, 96.0), Left(time_s=96.5, attempt=0, step=100)], usd)
    assert not done.decide(done.books(200.0, usd(200.0), RATE)).end


def test_what_earlier_drivers_spent_counts_for_the_run_and_its_epoch() -> None:
    earlier = Before(
        -100.0, Decimal("0.5"), RATE, {0: Decimal("0.4"), 1: Decimal("0.1"), None: Decimal(9)}
    )
    again = guard(BudgetConfig(), earlier, first_step=12)
    books = again.books(5.0, usd(5.0), RATE)
    assert (books.usd, books.epoch_usd) == (Decimal("0.505"), Decimal("0.105"))
    assert (books.started_s, books.step, books.epoch_steps_left) == (-100.0, 12, 8.0)
    again.follow([began(1, 1.0), step(13, 1, 10.0, 1), step(21, 1, 12.0, epoch=2)], usd)
    books = again.books(15.0, usd(15.0), RATE)
    assert (books.usd, books.epoch_usd) == (Decimal("0.515"), Decimal("0.005"))
    assert books.epoch_steps_left == 9.0


def test_a_node_without_a_price_stops_a_run_with_a_budget_unless_it_is_allowed() -> None:
    limits = BudgetConfig(max_dollars_per_run=Decimal(9))
    for changes, stops in (({}, True), ({"allow_unknown_price": True}, False)):
        one = guard(limits.model_copy(update=changes))
        one.follow([began(0, 1.0)], usd)
        act = one.decide(one.books(5.0, Decimal(0), Decimal(0)), "node abc (box, spot)")
        assert (act.leave == 0) is stops
        assert not stops or "the price of node abc (box, spot) is not known" in (act.reason or "")
    only_time = guard(BudgetConfig(deadline=datetime(2099, 1, 1, tzinfo=UTC)))
    assert only_time.decide(only_time.books(5.0, Decimal(0), Decimal(0)), "node abc") == (
        guard(BudgetConfig()).decide(only_time.books(5.0, Decimal(0), Decimal(0)))
    )


def test_a_loss_spike_has_the_run_leave() -> None:
    calm = guard(BudgetConfig(kill_on_loss_spike=2.0))
    steps = [step(n, 0, 20.0 + n) for n in range(1, 40)]
    high: Step = step(40, 0, 60.0).model_copy(update={"loss": 2.5})
    calm.follow([began(0, 10.0), *steps], usd)
    assert calm.decide(calm.books(60.0, usd(60.0), RATE)).leave is None
    calm.follow([high, step(41, 0, 61.0)], usd)
    act = calm.decide(calm.books(61.0, usd(61.0), RATE))
    assert act.leave == 0
    assert "the loss is 2.5, more than 2 times the median" in (act.reason or "")


def test_a_run_waits_while_its_nodes_are_too_dear_and_goes_on_after() -> None:
    limits = BudgetConfig(pause_above_usd_per_hour=Decimal(4))
    dear, fair = Decimal(5), Decimal(4)
    paused = guard(limits)
    paused.follow([began(0, 1.0)], usd)

    def act(now_s: float, price: Decimal, has_nodes: bool = True) -> Act:
        return paused.decide(paused.books(now_s, usd(now_s), price * has_nodes, price))

    assert act(5.0, fair) == Act()
    asked = act(6.0, dear)
    assert (asked.leave, asked.hold, asked.end) == (0, True, False)
    assert (
        asked.reason
        == "the run's nodes cost $5.0000 an hour, budget.pause_above_usd_per_hour is $4.0000"
    )
    paused.follow([Left(time_s=7.0, attempt=0, step=3)], usd)
    assert (act(8.0, dear, has_nodes=False).hold, paused.paused) == (True, True)
    assert act(9.0, fair, has_nodes=False) == Act(hold=False)
    assert act(10.0, fair) == Act()
    assert not paused.paused


def test_the_budget_is_told_with_the_progress() -> None:
    told = guard(BudgetConfig(max_dollars_per_run=Decimal("0.5")))
    assert told.so_far(told.books(5.0, usd(5.0), RATE)) == "$0.0050 of $0.5000"
    told.follow([began(0, 10.0), *(step(n, 0, 20.0 + n) for n in range(1, 41))], usd)
    books = told.books(60.0, usd(60.0), RATE)
    assert told.so_far(books) == "$0.0600 of $0.5000 (about $0.1200 at the end)"
    assert guard(BudgetConfig()).so_far(books) is None
