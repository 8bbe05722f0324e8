"""When saves fall due, for any steps, costs and histories."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide.train.config import CheckpointConfig
from ebbtide.train.rhythm import (
    LEAST_S,
    MOST_S,
    NO_INTERRUPTIONS,
    PATIENCE_S,
    Interruptions,
    Patience,
    Rhythm,
    automatic_s,
    young_daly_s,
)

COSTS = st.floats(1e-3, 1e3)
TIMES = st.floats(1.0, 1e7)


def rhythm(every: int | str, interruptions: Interruptions = NO_INTERRUPTIONS) -> Rhythm:
    return Rhythm(CheckpointConfig(every=every), interruptions, 0.0)


def saves(one: Rhythm, steps: int, step_s: float, stored_s: float = 0.0) -> list[float]:
    """The times at which saves begin, of steps of that length; each is stored for so long."""
    begun: list[float] = []
    busy_until_s = 0.0
    for step in range(1, steps + 1):
        now_s = (step - 1) * step_s
        wants, _ = one.ask(step, now_s, is_busy=now_s < busy_until_s)
        if wants:
            begun.append(step * step_s)
            one.began(step * step_s)
            busy_until_s = step * step_s + stored_s
    return begun


@given(COSTS, TIMES)
def test_young_dalys_interval_costs_least(cost_s: float, between_s: float) -> None:
    def waste(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / (2 * between_s)

    best_s = young_daly_s(cost_s, between_s)
    assert waste(best_s) <= min(waste(0.9 * best_s), waste(1.1 * best_s))


@given(st.none() | COSTS, st.floats(0, 1e4), TIMES)
def test_the_automatic_interval_is_bounded(
    cost_s: float | None, took_s: float, between_s: float
) -> None:
    interval_s = automatic_s(cost_s, took_s, between_s)
    assert max(LEAST_S, took_s) <= interval_s <= max(MOST_S, took_s)
    if cost_s is not None and LEAST_S < (best_s := young_daly_s(cost_s, between_s)) < MOST_S:
        assert interval_s == max(best_s, took_s)


@given(COSTS, COSTS, TIMES, TIMES)
def test_dearer_saves_are_made_less_often_and_evictions_make_them_more_often(
    cheap_s: float, dear_s: float, often_s: float, seldom_s: float
) -> None:
    cheap_s, dear_s = sorted([cheap_s, dear_s])
    often_s, seldom_s = sorted([often_s, seldom_s])
    assert automatic_s(cheap_s, 0, often_s) <= automatic_s(dear_s, 0, often_s)
    assert automatic_s(cheap_s, 0, often_s) <= automatic_s(cheap_s, 0, seldom_s)


def test_what_is_known_of_interruptions_outweighs_what_was_expected() -> None:
    assert Interruptions().mean_s() == 3600.0
    assert Interruptions(99, 99 * 120.0).mean_s() == pytest.approx(120.0, rel=0.3)
    assert Interruptions(0, 30 * 86400.0).mean_s() > 29 * 86400.0


def test_work_that_was_in_no_checkpoint_is_saved_soon_after_a_restart() -> None:
    config = CheckpointConfig(every="30m")
    one = Rhythm(config, NO_INTERRUPTIONS, 0.0, is_owed=True)
    assert saves(one, 5, 1.0) == [1.0]
    assert saves(rhythm("30m"), 5, 1.0) == []


def test_steps_are_counted() -> None:
    assert saves(rhythm(3), 10, 1.0) == [3.0, 6.0, 9.0]


@given(st.floats(0.01, 50), st.integers(1, 60))
def test_the_clock_is_kept_as_near_as_steps_allow(step_s: float, every_s: int) -> None:
    begun = [0.0, *saves(rhythm(f"{every_s}s"), 300, step_s)]
    gaps = [after - before for before, after in zip(begun, begun[1:], strict=False)]
    ideal = max(step_s, every_s)
    assert all(abs(gap - ideal) <= step_s * 0.51 + 1e-6 for gap in gaps[1:])
    assert len(begun) > 1 or every_s > 298 * step_s


def test_one_that_falls_due_while_another_is_stored_waits_and_the_next_replaces_it() -> None:
    one = rhythm(2)
    answers = []
    for step, is_busy in enumerate([False, False, True, True, True, True, False, False], start=1):
        answers.append(one.ask(step, float(step), is_busy=is_busy))
        if answers[-1][0]:
            one.began(float(step))
    assert answers == [
        (False, None),
        (True, None),
        (False, None),
        (False, None),  # due, and waits
        (False, None),
        (False, 4),  # the next is due
        (True, None),  # made up for
        (True, None),
    ]


@given(st.integers(1, 9), st.floats(0, 30))
def test_every_save_that_falls_due_is_begun_or_said_to_be_left_out(
    every: int, stored_s: float
) -> None:
    one, begun, left_out, busy_until_s = rhythm(every), 0, 0, 0.0
    for step in range(1, 101):
        wants, missed = one.ask(step, float(step), is_busy=step < busy_until_s)
        left_out += missed is not None
        if wants:
            begun += 1
            one.began(step + 1.0)
            busy_until_s = step + 1.0 + stored_s
    assert 100 // every - 1 <= begun + left_out <= 100 // every


def test_auto_learns_what_a_save_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one = rhythm("auto", Interruptions(9, 9 * 600.0))
    assert one.interval_s(0.0) == LEAST_S
    one.ended(cost_s=2.0, took_s=5.0, now_s=10.0)
    expected_s = math.sqrt(2 * 2.0 * Interruptions(9, 9 * 600.0).mean_s(10.0))
    assert one.interval_s(10.0) == pytest.approx(expected_s)
    one.ended(cost_s=2.0, took_s=5.0, now_s=11.0)
    assert caplog.text.count("a save every 60 s from now on: one costs 2.00 s") == 1


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 9)), max_size=50))
def test_waiting_is_bounded_by_a_share_of_the_time(pauses: list[tuple[float, float]]) -> None:
    patience, now_s, waited_s = Patience(0.0), 0.0, 0.0
    for pause_s, lasts_s in pauses:
        now_s += pause_s
        wait_s = min(lasts_s, patience.left_s(now_s))
        now_s += wait_s
        waited_s += wait_s
        patience.spend(wait_s, now_s)
        assert waited_s <= PATIENCE_S + 0.02 * now_s + 1e-6


def test_what_hangs_or_lasts_too_long_is_not_waited_for() -> None:
    patience = Patience(0.0)
    assert patience.allows(10.0, 12.0)
    assert not patience.allows(10.0, 10.0 + PATIENCE_S + 1)
    assert not patience.allows(10.0, 9.0)  # it should have been done
    patience.spend(PATIENCE_S, 10.0)
    assert not patience.allows(10.0, 11.0)
    assert patience.allows(60.0, 61.0)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "30", "0s", "s", "5 m", "often", None, [3]])
def test_what_is_no_rhythm_is_refused(every: Any) -> None:
    with pytest.raises(ValidationError, match="a number of steps, a time such as 30s, 5m or 1h"):
        CheckpointConfig(every=every)


def test_times_steps_and_the_older_name() -> None:
    assert CheckpointConfig(every="1.5m").every_s == 90.0
    assert CheckpointConfig(every=7).every_s is None
    older = CheckpointConfig.model_validate({"every_steps": 7})
    assert older == CheckpointConfig(every=7)
    with pytest.raises(ValidationError, match="give one of them"):
        CheckpointConfig.model_validate({"every_steps": 7, "every": 8})
