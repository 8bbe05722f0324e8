"""What the controller's side does with the desk; the actors are replaced by a plain desk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from ebbtide.platform.errors import DataError
from ebbtide.platform.ray_seam import NodeOffer, ProcessLost
from ebbtide.train import controller
from ebbtide.train.controller import Judge, Scaling
from ebbtide.train.desk import Desk
from ebbtide.train.elastic import Limits
from ebbtide.train.events import Failed, LeaveAsked, Waiting
from ebbtide.train.failures import PeerLost, UserCrash


class Remote:
    """A plain object with the calling form of an actor; calls happen at once."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                return method(*arguments)

        return Method


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk()
    monkeypatch.setattr(controller, "find_desk", lambda _: Remote(desk))
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    yield desk


def offer(name: str, *, draining: bool = False, reachable: bool = True) -> NodeOffer:
    return NodeOffer(name, 1, draining, reachable)


def test_too_few_workers_are_told_and_waited_for(desk: Desk) -> None:
    scaling = Scaling("run", Limits(3, 4))
    assert scaling.to_start([offer("a"), offer("b")]) is None
    (event,) = desk.take()[0]
    assert isinstance(event, Waiting)
    assert (event.needs, event.has) == (3, 2)
    assert scaling.to_start([offer("a"), offer("b"), offer("c")]) == 3


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
    assert scaling.to_request([offer("a"), offer("b", draining=True)]) == 5


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


def test_crashes_are_forgiven_as_often_as_the_job_says(
    desk: Desk, lose: Callable[[set[str]], None]
) -> None:
    judge = Judge("run", max_failures=2)
    desk.begin(["a", "b"])
    answers = [judge.go_on({1: UserCrash("boom")}) for _ in range(3)]
    assert answers == [True, True, False]
    assert failures(desk) == [("crash", True)] * 3


def test_an_error_that_would_come_again_ends_the_run(
    desk: Desk, lose: Callable[[set[str]], None]
) -> None:
    desk.begin(["a"])
    assert not Judge("run", max_failures=9).go_on({0: DataError("bad shard")})
    assert failures(desk) == [("final", False)]
