"""How many workers there should be, decided by what is known and what was needed of late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.serve.config import Role, ScalingConfig
from ebbtide.serve.scaling import Bounds, Known, Scaler, need

CONFIG = ScalingConfig(ttft_s=1.0, gap_s=0.05, idle_s=300, down_after_s=60)
BUSY = Known({"prefill": 1, "decode": 1}, num_sequences=4, gap_s=0.02, prefill_tokens_per_s=1000)


def of(prefill: int, decode: int) -> dict[Role, int]:
    return {"prefill": prefill, "decode": decode}


def scaler(least: int = 1, most: int = 8) -> Scaler:
    return Scaler({"prefill": Bounds(least, most), "decode": Bounds(least, most)}, CONFIG)


def test_prefill_workers_compute_what_is_queued_within_the_target() -> None:
    assert need(replace(BUSY, num_queued_tokens=3500), CONFIG)["prefill"] == 4
    assert need(replace(BUSY, num_queued_tokens=1050), CONFIG)["prefill"] == 1
    assert need(replace(BUSY, num_queued_tokens=9, prefill_tokens_per_s=0), CONFIG)["prefill"] == 0


def test_decode_workers_follow_the_fullest_of_their_measures() -> None:
    two = replace(BUSY, ready=of(1, 2), num_sequences=40)
    assert need(two, CONFIG)["decode"] == 1
    assert need(replace(two, gap_s=0.1), CONFIG)["decode"] == 4
    assert need(replace(two, kv_usage=1.0), CONFIG)["decode"] == 3
    assert need(replace(two, num_engine_waiting=20), CONFIG)["decode"] == 4
    assert need(replace(two, num_sequences=0, gap_s=9), CONFIG)["decode"] == 0


def test_workers_are_added_at_once_and_the_roles_do_not_depend_on_each_other() -> None:
    assert scaler().decide(0, replace(BUSY, num_queued_tokens=3000), of(1, 1)) == of(3, 1)
    assert scaler().decide(0, replace(BUSY, gap_s=0.15), of(1, 1)) == of(1, 3)
    assert scaler(most=2).decide(0, replace(BUSY, gap_s=9), of(1, 1)) == of(1, 2)


def test_those_that_start_are_not_asked_for_again() -> None:
    it, slow = scaler(), replace(BUSY, gap_s=0.1)
    present = of(1, 1)
    for now_s in range(30):  # only one is ready all the time
        present = it.decide(now_s, slow, present)
        assert present == of(1, 2)


def test_workers_are_taken_away_when_they_were_not_needed_for_a_while() -> None:
    it, present = scaler(), of(4, 4)
    for now_s in range(150):
        load = 0.2 if now_s == 40 else 0.01  # comes back once
        present = it.decide(now_s, replace(BUSY, ready=of(4, 4), gap_s=load), present)
        if now_s < 100:
            assert present["decode"] >= 4, now_s
    assert present == of(1, 1)


@pytest.mark.parametrize("tick_s", [0.3, 1.03, 7.0, 100.0])
def test_however_often_it_is_asked(tick_s: float) -> None:
    it, present, now_s = scaler(), of(4, 4), 0.0
    while present != of(1, 1):
        assert now_s <= 2 * max(tick_s, CONFIG.down_after_s)
        present = it.decide(now_s, replace(BUSY, ready=of(4, 4), gap_s=0.01), present)
        now_s += tick_s
    assert now_s > CONFIG.down_after_s


def test_all_go_together_when_nobody_asks_and_come_back_at_the_first_request() -> None:
    it, idle = scaler(least=0), Known(of(1, 2), idle_s=299)
    assert it.decide(0, idle, of(1, 2)) == of(1, 2)
    assert it.decide(1, replace(idle, idle_s=300), of(1, 2)) == of(0, 0)
    gone = Known(of(0, 0), idle_s=900)
    assert it.decide(2, gone, of(0, 0)) == of(0, 0)
    assert it.decide(3, replace(gone, num_waiting=1, idle_s=0), of(0, 0)) == of(1, 1)
    assert it.decide(4, replace(gone, num_waiting=9, idle_s=0), of(1, 1)) == of(1, 1)  # they start
    assert scaler(least=1).decide(0, replace(idle, idle_s=1e6), of(1, 1)) == of(1, 1)


_KNOWN = st.builds(
    Known,
    ready=st.builds(of, st.integers(0, 9), st.integers(0, 9)),
    num_queued_tokens=st.integers(0, 10**6),
    prefill_tokens_per_s=st.floats(0, 1e5),
    num_sequences=st.integers(0, 500),
    num_engine_waiting=st.integers(0, 500),
    kv_usage=st.floats(0, 1),
    gap_s=st.floats(0, 10),
    num_waiting=st.integers(0, 100),
    idle_s=st.floats(0, 1000),
)


@given(st.lists(_KNOWN, min_size=1, max_size=30), st.integers(0, 2), st.integers(2, 6))
def test_whatever_is_known_the_bounds_hold_and_none_goes_while_there_are_requests(
    course: list[Known], least: int, most: int
) -> None:
    it, present = scaler(least, most), of(max(1, least), max(1, least))
    for second, known in enumerate(course):
        after = it.decide(float(second), known, present)
        assert all(least <= number <= most for number in after.values())
        if known.num_waiting or (any(present.values()) and known.idle_s < CONFIG.idle_s):
            assert all(after.values())
        assert all(after.values()) or not any(after.values())  # all together
        present = after


@given(_KNOWN)
def test_under_a_load_that_does_not_change_the_number_changes_once(known: Known) -> None:
    it, present = scaler(), of(1, 1)
    first = it.decide(0.0, known, present)
    for second in range(1, 20):
        assert it.decide(float(second), known, first) == first
