"""What the controller's side does with the desk; the actors are replaced by a plain desk."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import ray

from ebbtide.platform.errors import DataError, NotFiniteError
from ebbtide.platform.ray_seam.decisions import NodeOffer, ProcessLost
from ebbtide.train import controller
from ebbtide.train.controller import Judge, Scaling
from ebbtide.train.desk import Desk
from ebbtide.train.elastic import (
    NOTICE_WINDOW_S,
    WARM_PATIENCE_S,
    Limits,
)
from ebbtide.train.events import (
    Failed,
    LeaveAsked,
    Notice,
    Remark,
    Skipped,
    Waiting,
)
from ebbtide.train.failures import PeerLost, UserCrash
from tests.train.conftest import Remote
from tests.train.test_events import step


def offer(
    name: str, *, draining: bool = False, reachable: bool = True, deadline_s: float | None = None
) -> NodeOffer:
    draining = draining or deadline_s is not None
    return NodeOffer(name, 1, draining, reachable, deadline_s, warm=True)


def cold(name: str) -> NodeOffer:
    return NodeOffer(name, 1)


def test_too_few_workers_are_told_and_waited_for(desk: Desk) -> None:
    scaling = Scaling("run", Limits(3, 4))
    assert scaling.to_start([offer("a"), offer("b")]) is None
    (event,) = desk.take()[0]
    assert isinstance(event, Waiting)
    assert (event.needs, event.has) == (3, 2)
    assert scaling.to_start([offer("a"), offer("b"), offer("c")]) == 3


def test_a_run_that_is_held_gives_its_nodes_back_and_asks_for_them_again(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 4))
    assert len(scaling.to_request([offer("a")])) == 4
    desk.wait_until(float("inf"))
    assert scaling.to_start([offer("a")]) is None
    assert scaling.to_request([offer("a")]) == []
    assert scaling.to_start([]) is None
    assert desk.take()[1] == ()
    desk.wait_until(0.0)
    assert scaling.to_start([]) is None
    assert scaling.to_request([]) == [{}] * 4
    assert scaling.to_start([offer("a")]) == 1


def test_a_running_generation_is_never_resized_before_it_has_left(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 4))
    attempt = desk.begin(["a", "b"])
    going = [offer("a"), offer("b", draining=True)]
    assert scaling.to_resize(going) is None
    assert scaling.to_resize(going) is None
    asked = [event for event in desk.take()[0] if isinstance(event, LeaveAsked)]
    assert [event.reason.partition(":")[0] for event in asked] == ["notice"]
    desk.left(attempt, 5)
    assert scaling.to_resize(going) == 1


def test_notices_that_come_together_make_one_restart(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    scaling = Scaling("run", Limits(1, 4))
    desk.begin(["a", "b", "c"])
    first = [offer("a"), offer("b", deadline_s=1120.0), offer("c")]
    both = [offer("a"), offer("b", deadline_s=1120.0), offer("c", deadline_s=1124.0)]
    scaling.to_resize(first)
    now_s += NOTICE_WINDOW_S - 1
    scaling.to_resize(both)
    events = desk.take()[0]
    assert [event.node for event in events if isinstance(event, Notice)] == ["b", "c"]
    assert not any(isinstance(event, LeaveAsked) for event in events)
    now_s += 1
    scaling.to_resize(both)
    (asked,) = [event for event in desk.take()[0] if isinstance(event, LeaveAsked)]
    assert asked.reason == "notice: b, c will be taken away"


def test_a_rank_on_a_node_that_is_not_reserved_is_noticed_too(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 2))
    desk.begin(["a", "b"])
    elsewhere = NodeOffer("b", workers=0, draining=True)
    others = NodeOffer("z", workers=0, draining=True)  # nothing to us
    scaling.to_resize([offer("a"), offer("c"), elsewhere, others])
    events, held = desk.take()
    assert [event.node for event in events if isinstance(event, Notice)] == ["b"]
    (asked,) = [event for event in events if isinstance(event, LeaveAsked)]
    assert asked.reason == "notice: b will be taken away"
    assert held == ("a", "b")


def test_a_notice_without_time_for_a_save_is_said_and_left_to_the_kill(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    scaling = Scaling("run", Limits(1, 4))
    desk.begin(["a", "b"])
    for _ in range(2):
        scaling.to_resize([offer("a"), offer("b", deadline_s=1001.0)])
    events = desk.take()[0]
    assert not any(isinstance(event, LeaveAsked) for event in events)
    (remark,) = [event for event in events if isinstance(event, Remark)]
    assert remark.text.startswith("notice: b will be gone before a save could be complete")


def test_growth_that_is_not_worth_it_is_said_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(1, 4, micro_batches=4, steps=11)
    scaling = Scaling("run", limits)
    attempt = desk.begin(["a", "b"])
    for number in range(1, 11):
        desk.post(step(number, attempt))
    desk.take()
    began_s = time.time()
    for later_s in (0.0, 20.0, 30.0):
        monkeypatch.setattr(time, "time", lambda s=began_s + later_s: s)
        scaling.to_resize([offer(name) for name in "abcd"])
    events = desk.take()[0]
    assert [event.kind for event in events] == ["remark"]


def test_a_new_node_is_grown_onto_when_it_is_warm(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = Scaling("run", Limits(1, 4))
    desk.begin(["a", "b"])
    desk.take()
    now_s = time.time() + 100.0
    monkeypatch.setattr(time, "time", lambda: now_s)

    def asked(*others: NodeOffer) -> int:
        scaling.to_resize([offer("a"), offer("b"), *others])
        return sum(isinstance(event, LeaveAsked) for event in desk.take()[0])

    for _ in range(3):
        assert asked(cold("c")) == 0
        now_s += 20.0
    assert asked(offer("c"), cold("d")) == 0  # one restart for both
    assert asked(offer("c"), offer("d")) == 1


def test_a_node_that_does_not_become_warm_is_taken_in_the_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = Scaling("run", Limits(1, 3))
    desk.begin(["a"])
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert scaling.to_start([cold("a"), cold("b")]) == 1
    now_s += WARM_PATIENCE_S
    assert scaling.to_start([cold("a"), cold("b"), cold("c")]) == 2


def test_a_restart_is_placed_where_the_copies_are(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 3))
    assert scaling.to_start([cold(name) for name in "abc"]) == 3
    assert scaling.to_place(3) == ["a", "b", "c"]
    desk.begin(["b", "c", "d"])
    left = [cold("a"), cold("b"), offer("c", reachable=False), cold("d"), cold("e")]
    assert scaling.to_start(left) == 2
    assert scaling.to_place(2) == ["b", "d"]
    assert scaling.to_place(2) == []  # Ray has not found the place


def test_a_new_driver_starts_where_the_last_ones_ranks_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(first_attempt=3, placed=("c", "d"))
    monkeypatch.setattr(controller, "find_desk", lambda _: Remote(desk))
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    scaling = Scaling("run", Limits(1, 2))
    assert scaling.to_start([cold(name) for name in "abcd"]) == 2
    assert scaling.to_place(2) == ["c", "d"]


def test_only_a_generation_that_was_asked_to_leave_is_waited_for(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 2))
    attempt = desk.begin(["a", "b"])
    assert not scaling.has_left()
    assert scaling.to_resize([offer("a"), offer("b", draining=True)]) is None  # it is asked now
    assert desk.reason_to_leave(attempt) is not None
    assert not scaling.has_left()
    desk.left(attempt, 7)
    assert scaling.has_left()
    assert scaling.to_resize([offer("b", draining=True)]) is None  # there is no node yet
    assert not scaling.has_left()


def test_a_generation_that_has_left_is_resized_once(desk: Desk) -> None:
    """The next group's ranks take seconds before they begin a generation."""
    scaling = Scaling("run", Limits(1, 4))
    attempt = desk.begin(["a", "b"])
    desk.left(attempt, 5)
    assert scaling.to_resize([offer("a")]) == 1
    assert scaling.to_resize([offer("a")]) is None
    desk.begin(["a"])
    assert scaling.to_resize([offer("a")]) is None


def test_a_generation_that_has_left_waits_for_enough_nodes(desk: Desk) -> None:
    scaling = Scaling("run", Limits(2, 4))
    desk.left(desk.begin(["a", "b"]), 5)
    assert scaling.to_resize([offer("a"), offer("b", draining=True)]) is None
    assert scaling.to_resize([offer("a"), offer("b", draining=True), offer("c")]) == 2


def test_workers_on_nodes_that_must_not_be_used_are_asked_for_again(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 4))
    assert scaling.to_request([offer("a"), offer("b", draining=True)]) == [{}] * 5


@pytest.mark.parametrize(
    ("in_use", "held"), [((), ("a", "b")), (("a",), ("a", "b")), (("a", "c"), ("a", "c"))]
)
def test_spare_nodes_are_held_only_while_there_is_use_for_them(
    desk: Desk, in_use: tuple[str, ...], held: tuple[str, ...]
) -> None:
    scaling = Scaling("run", Limits(1, 2))
    if in_use:
        desk.begin(in_use)
        scaling.to_resize([offer("a"), offer("b")])
    else:
        scaling.to_start([offer("a"), offer("b")])
    assert desk.take()[1] == held


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], None]:
    def set_lost(nodes: set[str]) -> None:
        monkeypatch.setattr(controller, "unreachable_nodes", lambda ids: nodes.intersection(ids))

    set_lost(set())
    return set_lost


def failures(desk: Desk) -> list[tuple[str, bool]]:
    return [(event.cause, event.counted) for event in desk.take()[0] if isinstance(event, Failed)]


def test_lost_nodes_are_forgiven_without_end(desk: Desk, lose: Callable[[set[str]], None]) -> None:
    judge = Judge("run", max_failures=0)
    lose({"b"})
    for _ in range(10):
        desk.begin(["a", "b"])
        assert judge.go_on({0: PeerLost("x"), 1: ProcessLost("y")})
    assert failures(desk) == [("node lost", False)] * 10


def test_the_next_start_waits_after_a_crash(desk: Desk, lose: Callable[[set[str]], None]) -> None:
    scaling = Scaling("run", Limits(1, 2))
    judge = Judge("run", max_failures=2)
    desk.begin(["a", "b"])
    assert judge.go_on({1: UserCrash("boom")})
    assert failures(desk) == [("crash", True)]
    assert scaling.to_start([offer("a")]) is None
    desk.wait_until(0.0)
    assert scaling.to_start([offer("a")]) == 1


def test_a_bad_batch_is_left_out_once(desk: Desk, lose: Callable[[set[str]], None]) -> None:
    judge = Judge("run", max_failures=0, skip_bad_batch=True)
    attempt = desk.begin(["a"])
    assert judge.go_on({0: NotFiniteError("step 7: nan", 7), 1: PeerLost("x")})
    assert desk.skipped() == (7,)
    assert not judge.go_on({0: NotFiniteError("step 9: nan", 9)})
    events = [event for event in desk.take()[0] if isinstance(event, Failed | Skipped)]
    assert [event.kind for event in events] == ["failed", "skipped", "failed"]
    assert {event.attempt for event in events} == {attempt}


def test_an_error_that_would_come_again_ends_the_run(
    desk: Desk, lose: Callable[[set[str]], None]
) -> None:
    desk.begin(["a"])
    assert not Judge("run", max_failures=9).go_on({0: DataError("bad shard")})
    assert failures(desk) == [("final", False)]
