"""The desk as a plain object."""

from __future__ import annotations

from ebbtide.train.desk import Desk, actor_name
from ebbtide.train.events import (
    GenerationBegan,
    LeaveAsked,
    Left,
    Notice,
    Remark,
    Skipped,
    Waiting,
)
from ebbtide.train.rhythm import Interruptions


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
    assert standing.running.has_left
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
    assert (standing.attempt, standing.running.has_left) == (second, False)
    assert desk.reason_to_leave(second) is None


def test_a_node_is_announced_once() -> None:
    desk = Desk()
    desk.announce({"b": 60.0})
    desk.announce({"a": None, "b": 60.0})
    notices = [(each.node, each.deadline_s) for each in desk.take()[0] if isinstance(each, Notice)]
    assert notices == [("b", 60.0), ("a", None)]


def test_a_kind_of_remark_is_kept_once_a_generation() -> None:
    desk = Desk()
    first = desk.begin(["a"])
    for gain in ("0.9", "0.8"):
        desk.remark(first, f"no growth: {gain}")
    desk.remark(first, "notice: too late")
    second = desk.begin(["a"])
    desk.remark(first, "no growth: of the last")
    desk.remark(second, "no growth: again")
    remarks = [each.text for each in desk.take()[0] if isinstance(each, Remark)]
    assert remarks == ["no growth: 0.9", "notice: too late", "no growth: again"]


def test_batches_that_are_left_out_stay_so() -> None:
    desk = Desk(skipped=[3])
    desk.post(Skipped(time_s=0.0, attempt=0, step=7))
    assert desk.skipped() == (3, 7)


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


def test_what_ends_a_generation_from_outside_is_counted() -> None:
    desk = Desk(interruptions=Interruptions(2, 100.0))
    first = desk.begin(["a"])
    assert desk.interruptions().count == 2
    desk.ask_to_leave(first, "growth: a node is there")
    second = desk.begin(["a", "b"])
    assert desk.interruptions().count == 2
    desk.ask_to_leave(second, "budget: too dear now")
    third = desk.begin(["a", "b"])
    assert desk.interruptions().count == 2
    desk.ask_to_leave(third, "notice: b")
    desk.begin(["a"])
    desk.begin(["a"])  # that one was killed
    assert desk.interruptions().count == 4
    assert desk.interruptions().observed_s > 100.0
