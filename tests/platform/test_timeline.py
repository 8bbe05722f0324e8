from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import (
    Alive,
    Attempt,
    Epoch,
    Finished,
    NodeDown,
    NodeUp,
    Record,
    Span,
    Started,
)
from ebbtide.platform.timeline import SILENCE_S, divide, microseconds, stays

T = 1_700_000_000.0


def up(node_id: str, at_s: float, price: str | None = "1") -> NodeUp:
    usd = None if price is None else Decimal(price)
    return NodeUp(
        node_id=node_id,
        time_s=T + at_s,
        instance_type="box",
        market=Market.SPOT,
        usd_per_hour=usd,
        usd_per_hour_on_demand=usd,
    )


def down(node_id: str, at_s: float) -> NodeDown:
    return NodeDown(node_id=node_id, time_s=T + at_s)


def span(
    node_id: str,
    start_s: float,
    end_s: float,
    attempt: int = 0,
    steps: tuple[int, int] | None = None,
    **seconds: float,
) -> Span:
    return Span(
        node_id=node_id,
        attempt=attempt,
        start_s=T + start_s,
        end_s=T + end_s,
        seconds={Owner(o): s for o, s in (seconds or {"compute": end_s - start_s}).items()},
        first_step=steps and steps[0],
        last_step=steps and steps[1],
    )


def attempt(index: int, start_s: float, first_step: int = 0) -> Attempt:
    return Attempt(index=index, start_s=T + start_s, first_step=first_step)


def epoch(index: int, start_s: float) -> Epoch:
    return Epoch(index=index, start_s=T + start_s)


def finished(at_s: float) -> Finished:
    return Finished(time_s=T + at_s, status="finished")


def seconds(*records: Record, now_s: float = 1000) -> dict[tuple[str, int | None, str], float]:
    """Seconds by node, attempt and owner."""
    found: Counter[tuple[str, int | None, str]] = Counter()
    for share, time_us in divide(records, T + now_s).items():
        found[share.terms.node_id, share.attempt, share.owner.value] += time_us
    return {key: time_us / 1e6 for key, time_us in found.items()}


def test_uncovered_time_is_restart_before_the_first_compute_and_idle_after_it() -> None:
    assert seconds(
        up("n", 0),
        attempt(0, 15),
        span("n", 20, 30),
        span("n", 31, 40, compute=8, data_stall=0.5),
        finished(50),
    ) == {
        ("n", 0, "restart"): 20,
        ("n", 0, "compute"): 18,
        ("n", 0, "data_stall"): 0.5,
        ("n", 0, "idle"): 1 + 0.5 + 10,
    }


def test_between_attempts_time_is_the_next_ones_restart_and_a_spare_node_is_idle() -> None:
    assert seconds(
        *(up("a", 0), up("b", 0), up("spare", 5), down("b", 12)),
        *(attempt(0, 0), span("a", 0, 10), span("b", 0, 10)),
        *(attempt(1, 17), span("a", 18, 20, attempt=1, restart=2), span("a", 20, 40, attempt=1)),
        finished(40),
    ) == {
        ("a", 0, "compute"): 10,
        ("b", 0, "compute"): 10,
        ("spare", 0, "idle"): 5,
        ("a", 1, "restart"): 10,
        ("b", 1, "restart"): 2,
        ("spare", 1, "restart"): 10,
        ("a", 1, "compute"): 20,
        ("spare", 1, "idle"): 20,
    }


def test_a_run_that_never_computed_was_starting() -> None:
    assert seconds(up("n", 0), finished(30)) == {("n", None, "restart"): 30}
    assert seconds(up("n", 0), attempt(4, 10), finished(30)) == {("n", 4, "restart"): 30}


def test_workers_that_wait_to_be_ended_do_not_keep_their_attempt_at_work() -> None:
    assert seconds(
        *(up("a", 0), up("b", 0), attempt(0, 0), span("a", 0, 10), span("b", 0, 10)),
        span("a", 10, 15, restart=5),
        *(attempt(1, 10, first_step=9), span("b", 20, 30, attempt=1)),
        finished(30),
    ) == {
        ("a", 0, "compute"): 10,
        ("b", 0, "compute"): 10,
        ("a", 0, "restart"): 5,
        ("a", 1, "restart"): 5,
        ("b", 1, "restart"): 10,
        ("b", 1, "compute"): 10,
        ("a", 1, "idle"): 10,
    }


def test_an_attempt_that_does_not_get_to_compute_is_a_restart_to_the_end() -> None:
    assert seconds(up("n", 0), span("n", 0, 10), attempt(1, 15), finished(30)) == {
        ("n", 0, "compute"): 10,
        ("n", 1, "restart"): 20,
    }


def test_steps_done_again_are_lost_work() -> None:
    first = (
        up("n", 0),
        attempt(0, 0),
        span("n", 0, 10, steps=(1, 10)),
        span("n", 10, 20, steps=(11, 15), compute=8, data_stall=1, restart=1),
    )
    second = (attempt(1, 20, first_step=13), span("n", 20, 30, attempt=1, steps=(14, 20)))
    assert seconds(*first, *second, finished(30)) == {
        ("n", 0, "compute"): 10 + 8 * 3 / 5,
        ("n", 0, "data_stall"): 1 * 3 / 5,
        ("n", 0, "lost_work"): 9 * 2 / 5,
        ("n", 0, "restart"): 1,
        ("n", 1, "compute"): 10,
    }


def test_an_attempt_that_falls_back_further_takes_earlier_ones_with_it() -> None:
    assert seconds(
        *(up("n", 0), attempt(0, 0), span("n", 0, 10, steps=(1, 10))),
        *(attempt(1, 10, first_step=10), span("n", 10, 20, attempt=1, steps=(11, 15))),
        *(attempt(2, 20, first_step=5), span("n", 20, 30, attempt=2, steps=(6, 9))),
        finished(30),
    ) == {
        ("n", 0, "compute"): 5,
        ("n", 0, "lost_work"): 5,
        ("n", 1, "lost_work"): 10,
        ("n", 2, "compute"): 10,
    }


def test_processes_of_one_node_share_its_time_equally() -> None:
    found = seconds(
        up("n", 0),
        span("n", 0, 12),
        span("n", 0, 12, data_stall=12),
        span("n", 6, 12, checkpoint_stall=6),
        finished(12),
    )
    assert found == {
        ("n", 0, "compute"): 3 + 2,
        ("n", 0, "data_stall"): 3 + 2,
        ("n", 0, "checkpoint_stall"): 2,
    }


def test_a_node_ends_where_the_run_finishes_or_with_its_last_sign_of_life() -> None:
    def end_s(*records: Record, now_s: float) -> float:
        (stay,) = stays(records, T + now_s)
        return stay.end_us / 1e6 - T

    assert end_s(up("n", 0), finished(30), Alive(time_s=T + 35), now_s=40) == 30
    assert end_s(up("n", 0), Alive(time_s=T + 35), now_s=40) == 40
    assert end_s(up("n", 0), Alive(time_s=T + 35), now_s=35 + SILENCE_S + 1) == 35
    assert end_s(up("n", 0), down("n", 10), down("n", 20), finished(30), now_s=40) == 10


def test_a_crashed_driver_s_nodes_end_before_the_next_driver_starts() -> None:
    day = 86_400.0
    found = stays(
        [
            *(Started(time_s=T), up("a", 1), up("b", 2), span("a", 1, 90)),
            *(Started(time_s=T + day), up("b", day + 1), finished(day + 50)),
        ],
        T + 2 * day,
    )
    assert [(s.terms.node_id, (s.end_us - s.start_us) / 1e6) for s in found] == [
        ("a", 89),
        ("b", 88),
        ("b", 49),
    ]


def test_a_second_node_up_changes_the_price_from_then_on() -> None:
    found = stays([up("n", 0, "1"), up("n", 10, "3"), finished(30)], T + 30)
    assert [(s.terms.usd_per_hour, (s.end_us - s.start_us) / 1e6) for s in found] == [
        (Decimal(1), 10),
        (Decimal(3), 20),
    ]


def test_a_node_whose_node_up_was_lost_is_accounted_without_a_price() -> None:
    (stay,) = stays([span("n", 3, 5), span("n", 8, 9)], T + 1000)
    assert (stay.end_us - stay.start_us, stay.terms.usd_per_hour) == (6_000_000, None)


def test_time_belongs_to_the_epoch_whose_step_it_led_to() -> None:
    records: list[Record] = [
        *(up("n", 0), attempt(0, 0), epoch(0, 1), span("n", 10, 30), epoch(1, 25)),
        *(attempt(1, 30), epoch(0, 30), span("n", 40, 50, attempt=1), finished(60)),
    ]
    found: Counter[tuple[int | None, str]] = Counter()
    for share, time_us in divide(records, T + 1000).items():
        found[share.epoch, share.owner.value] += time_us // 10**6
    assert found == {
        (0, "restart"): 10 + 10,
        (0, "compute"): 15 + 10,
        (1, "compute"): 5,
        (0, "idle"): 10,
    }


def test_a_launch_that_fails_at_once_has_no_time() -> None:
    assert seconds(up("n", 5), down("n", 5), attempt(0, 5), finished(60)) == {}


TIMES = st.integers(0, 400).map(lambda tick: tick / 8) | st.floats(0, 50)
NODES = st.sampled_from("abc")


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start_s, end_s = sorted((draw(TIMES), draw(TIMES)))
    first = draw(st.integers(1, 20))
    return Span(
        node_id=draw(NODES),
        attempt=draw(st.integers(0, 3)),
        start_s=T + start_s,
        end_s=T + end_s,
        seconds=draw(st.dictionaries(st.sampled_from(Owner), st.floats(0, 20), max_size=4)),
        first_step=draw(st.sampled_from((None, first))),
        last_step=first + draw(st.integers(0, 5)),
    )


RECORDS: st.SearchStrategy[list[Record]] = st.lists(
    st.one_of(
        st.builds(up, NODES, TIMES, st.sampled_from(("1.25", "0.0001", None))),
        st.builds(down, NODES, TIMES),
        st.builds(attempt, st.integers(0, 3), TIMES, st.integers(0, 20)),
        spans(),
        st.builds(epoch, st.integers(0, 3), TIMES),
        st.builds(finished, TIMES),
        TIMES.map(lambda at_s: Alive(time_s=T + at_s)),
        TIMES.map(lambda at_s: Started(time_s=T + at_s)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.floats(0, 200), st.randoms(use_true_random=False))
def test_owners_partition_the_node_time_for_any_records(
    records: list[Record], now_s: float, shuffler: random.Random
) -> None:
    found = stays(records, T + now_s)
    for first, second in zip(found, found[1:], strict=False):
        same_node = first.terms.node_id == second.terms.node_id
        assert not same_node or first.end_us <= second.start_us
    parts = divide(records, T + now_s)
    assert sum(parts.values()) == sum(stay.end_us - stay.start_us for stay in found)
    by_node: Counter[str] = Counter()
    for stay in found:
        by_node[stay.terms.node_id] += stay.end_us - stay.start_us
    for share, time_us in parts.items():
        assert time_us > 0
        by_node[share.terms.node_id] -= time_us
    assert not any(by_node.values())

    again = records + [record for record in records if shuffler.random() < 0.3]
    shuffler.shuffle(again)
    assert divide(again, T + now_s) == parts


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_microseconds_of_epoch_seconds_are_exact(offset_us: int) -> None:
    base_us = 1_700_000_000 * 10**6 + offset_us
    assert microseconds(base_us / 10**6) == base_us
