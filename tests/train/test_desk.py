"""The desk as a plain object."""

from __future__ import annotations

from ebbtide.train.desk import Desk, actor_name
from ebbtide.train.events import GenerationBegan, LeaveAsked, Left, Waiting


def test_attempts_go_on_from_those_of_earlier_drivers() -> None:
    desk = Desk(first_attempt=3)
    assert desk.standing() is None
    assert desk.begin(["a", "b"], "{}") == 3
    assert desk.begin(["a"], "{}") == 4


def test_a_generation_is_asked_once_and_leaves_once() -> None:
    desk = Desk()
    first = desk.begin(["a", "b"])
    desk.ask_to_leave(first, "notice: b")
    desk.ask_to_leave(first, "growth: 3")
    assert desk.reason_to_leave(first) == "notice: b"
    desk.left(first, 7)
    standing = desk.standing()
    assert standing is not None
    assert standing.has_left
    events, _ = desk.take()
    assert [type(event) for event in events] == [GenerationBegan, LeaveAsked, Left]
    assert desk.take()[0] == []


def test_the_next_generation_is_not_asked_for_the_sake_of_the_last() -> None:
    desk = Desk()
    first = desk.begin(["a", "b"])
    desk.ask_to_leave(first, "notice: b")
    second = desk.begin(["a"])
    assert desk.reason_to_leave(second) is None
    desk.ask_to_leave(first, "late")
    desk.left(first, 7)
    standing = desk.standing()
    assert standing is not None
    assert (standing.attempt, standing.has_left) == (second, False)
    assert desk.reason_to_leave(second) is None


def test_waiting_is_told_once_in_a_while() -> None:
    desk = Desk()
    for _ in range(5):
        desk.waiting(4, 2)
    events, _ = desk.take()
    assert [(event.needs, event.has) for event in events if isinstance(event, Waiting)] == [(4, 2)]


def test_waiting_is_told_again_when_what_there_is_changes() -> None:
    desk = Desk()
    desk.waiting(4, 2)
    desk.waiting(4, 3)
    assert len(desk.take()[0]) == 2


def test_the_driver_learns_which_nodes_are_held() -> None:
    desk = Desk()
    desk.hold(["b", "a"])
    assert desk.take()[1] == ("b", "a")


def test_a_runs_actor_has_one_name() -> None:
    assert actor_name("s3://bucket/ä/run") == actor_name("s3://bucket/ä/run")
    assert actor_name("a") != actor_name("b")
