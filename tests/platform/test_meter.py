from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.meter import Meter, Owner


class Spans:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float, dict[Owner, float], int | None]] = []
        self.cut: Callable[[], None] = lambda: None

    def span(
        self, start_s: float, end_s: float, seconds: Mapping[Owner, float], step: int | None
    ) -> None:
        self.found.append((start_s, end_s, dict(seconds), step))

    def attach(self, cut: Callable[[], None]) -> None:
        self.cut = cut


def test_the_inner_owner_owns_the_inner_time() -> None:
    clock, spans = FakeClock(100), Spans()
    meter = Meter(clock, spans)
    clock.sleep(1)  # measured by no one
    with meter.measure(Owner.COMPUTE):
        clock.sleep(2)
        with meter.measure(Owner.DATA_STALL):
            clock.sleep(3)
        clock.sleep(4)
    assert meter.take() == {Owner.COMPUTE: 6, Owner.DATA_STALL: 3}
    assert spans.found == [(101, 110, {Owner.COMPUTE: 6, Owner.DATA_STALL: 3}, None)]


def test_a_short_gap_stays_in_the_span_and_a_long_one_ends_it() -> None:
    clock, spans = FakeClock(), Spans()
    meter = Meter(clock, spans)
    for gap_s in (0.01, 2.0, 0.0):
        with meter.measure(Owner.COMPUTE):
            clock.sleep(1)
        clock.sleep(gap_s)
    clock.sleep(9)
    meter.step = 1
    assert [start for start, _, _, _ in spans.found] == pytest.approx([0, 4.01])
    assert [end for _, end, _, _ in spans.found] == pytest.approx([2.01, 5.01])
    assert [sum(seconds.values()) for _, _, seconds, _ in spans.found] == pytest.approx([2, 1])


def test_steps_and_takes_cut_an_open_measure() -> None:
    clock, spans = FakeClock(), Spans()
    meter = Meter(clock, spans)
    with meter.measure(Owner.COMPUTE):
        clock.sleep(1)
        meter.step = 1
        clock.sleep(2)
        assert meter.take() == {Owner.COMPUTE: 3}
        meter.step = 2
        clock.sleep(4)
    assert meter.take() == {Owner.COMPUTE: 4}
    assert meter.take() == {}
    assert [(end - start, step) for start, end, _, step in spans.found] == [
        (1, None),
        (2, 1),
        (4, 2),
    ]


def test_time_is_booked_also_when_the_measured_code_raises() -> None:
    clock = FakeClock()
    meter = Meter(clock)
    with (
        pytest.raises(RuntimeError),
        meter.measure(Owner.COMPUTE),
        meter.measure(Owner.CHECKPOINT_STALL),
    ):
        clock.sleep(5)
        raise RuntimeError
    clock.sleep(1)
    with meter.measure(Owner.COMPUTE):
        clock.sleep(2)
    assert meter.take() == {Owner.CHECKPOINT_STALL: 5, Owner.COMPUTE: 2}


def test_a_background_thread_owns_no_time_but_may_cut() -> None:
    clock, spans = FakeClock(), Spans()
    meter = Meter(clock, spans)

    def background() -> None:
        with meter.measure(Owner.CHECKPOINT_STALL):
            clock.sleep(3)
        spans.cut()

    with meter.measure(Owner.COMPUTE):
        thread = threading.Thread(target=background)
        thread.start()
        thread.join()
        assert spans.found == [(0, 3, {Owner.COMPUTE: 3}, None)]
        clock.sleep(1)
    assert meter.take() == {Owner.COMPUTE: 4}


class SleepyClock(FakeClock):
    """A machine that was suspended: wall time has gone on, monotonic time has not."""

    asleep_s = 0.0

    def time(self) -> float:
        return self.now_s + self.asleep_s


def test_time_asleep_belongs_to_no_measure_and_later_spans_are_at_the_wall_time() -> None:
    clock, spans = SleepyClock(100), Spans()
    meter = Meter(clock, spans)
    with meter.measure(Owner.COMPUTE):
        clock.sleep(1)
        clock.asleep_s = 3600
        spans.cut()
        clock.sleep(1)
    spans.cut()
    assert [(start, end) for start, end, _, _ in spans.found] == [(100, 101), (3701, 3702)]


@settings(deadline=None)
@given(
    st.recursive(
        st.floats(0.001, 10),
        lambda inner: st.tuples(st.sampled_from(Owner), st.lists(inner, max_size=4)),
        max_leaves=20,
    )
)
def test_any_nesting_covers_the_measured_time_once(tree: object) -> None:
    clock, spans = FakeClock(), Spans()
    meter = Meter(clock, spans)

    def walk(node: object) -> None:
        if isinstance(node, tuple):
            with meter.measure(node[0]):
                for child in node[1]:
                    walk(child)
        elif isinstance(node, float):
            clock.sleep(node)

    with meter.measure(Owner.IDLE):
        clock.sleep(1)
        walk(tree)
    assert sum(meter.take().values()) == pytest.approx(clock.now_s)
    ((start_s, end_s, seconds, _),) = spans.found
    assert (start_s, end_s) == (0, clock.now_s)
    assert sum(seconds.values()) == pytest.approx(end_s)
