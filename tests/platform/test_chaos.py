"""Chaos: by a plan on a clock of its own, and on a real cluster with real signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from ebbtide.platform.chaos import Chaos
from ebbtide.platform.chaos_plan import Event, Plan
from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_nodes import LocalNode


class FakeNodes:
    """Nodes that only say what was done to them; ``workers`` are busy on each."""

    def __init__(self, count: int, workers: int = 1) -> None:
        self.live = [f"n{i}" for i in range(count)]
        self.workers, self.started = workers, count
        self.deeds: list[str] = []

    def nodes(self) -> list[LocalNode]:
        return [LocalNode(name, f"id-{name}", int(name[1:])) for name in self.live]

    def busy_workers(self, node: LocalNode, named: str = "") -> list[int]:
        return [1000 * node.session + i for i in range(self.workers)]

    def drain(self, node: LocalNode, deadline_s: float) -> None:
        self.deeds.append(f"drain {node.name} until {deadline_s:.0f}")

    def kill(self, node: LocalNode) -> None:
        self.deeds.append(f"kill {node.name}")
        if node.name in self.live:
            self.live.remove(node.name)

    def kill_worker(self, pid: int) -> None:
        self.deeds.append(f"kill {pid}")

    def stop(self, node: LocalNode) -> Callable[[], None]:
        self.deeds.append(f"stop {node.name}")
        return lambda: self.deeds.append(f"go on {node.name}")

    def stop_worker(self, pid: int) -> Callable[[], None]:
        self.deeds.append(f"stop {pid}")
        return lambda: self.deeds.append(f"go on {pid}")

    def add(self) -> str:
        name, self.started = f"n{self.started}", self.started + 1
        self.live.append(name)
        return name


class AtOnce(Executor):
    """Runs what is submitted before it returns, so that a fake clock stands still meanwhile."""

    def submit(self, call: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*arguments, **options))
        return future


def run(plan: Plan, nodes: FakeNodes) -> list[tuple[str, str | None, float]]:
    chaos = Chaos(nodes, plan, clock=FakeClock(), adder=AtOnce())
    return [(each.deed, each.node, round(each.time_s)) for each in chaos.run()]


def test_a_drained_node_is_taken_away_at_its_deadline() -> None:
    nodes = FakeNodes(2)
    plan = Plan(events=(Event(do="drain", at_s=10, node="n1", deadline_s=30),))
    assert run(plan, nodes) == [("drain", "n1", 10), ("take_away", "n1", 40)]
    assert nodes.deeds == ["drain n1 until 40", "kill n1"]


def test_kills_and_stops_are_of_nodes_or_workers_and_what_is_stopped_goes_on() -> None:
    nodes = FakeNodes(4)
    plan = Plan(
        events=(
            Event(do="kill", at_s=1, node="n0"),
            Event(do="kill", at_s=2, node="n1", target="worker"),
            Event(do="stop", at_s=3, node="n2", for_s=10),
            Event(do="stop", at_s=4, node="n3", for_s=2, target="worker"),
        )
    )
    assert run(plan, nodes) == [
        ("kill", "n0", 1),
        ("kill_worker", "n1", 2),
        ("stop", "n2", 3),
        ("stop", "n3", 4),
        ("go_on", "n3", 6),
        ("go_on", "n2", 13),
    ]
    assert nodes.deeds[-2:] == ["go on 3000", "go on n2"]


def test_the_same_seed_does_the_same_and_nodes_are_replaced() -> None:
    plan = Plan.every(15, 20, replace_after_s=5)
    first = run(plan, FakeNodes(4))
    assert first == run(plan, FakeNodes(4))
    assert [deed for deed, _, _ in first].count("kill") == 20
    assert [deed for deed, _, _ in first].count("add") == 20
    assert len({node for deed, node, _ in first if deed == "kill"}) == 20


def test_what_cannot_be_done_is_skipped_with_its_reason() -> None:
    plan = Plan(
        keep_nodes=1,
        events=(
            Event(do="kill", at_s=1, node="n7"),
            Event(do="kill", at_s=2, count=3),
            Event(do="kill", at_s=3, target="worker"),
            Event(do="kill", at_s=4),
            Event(do="kill", at_s=5),
        ),
    )
    chaos = Chaos(FakeNodes(2, workers=0), plan, clock=FakeClock())
    skipped = [(each.event, each.why) for each in chaos.run() if each.deed == "skip"]
    assert [event for event, _ in skipped] == [0, 1, 2, 4]
    reasons = " / ".join(str(why) for _, why in skipped)
    assert "n7 wanted; usable: n0, n1 / 3 nodes wanted" in reasons
    assert "has no busy worker process / keep_nodes is 1" in reasons


def test_a_drained_or_stopped_node_is_not_chosen_again() -> None:
    plan = Plan(
        keep_nodes=0,
        events=(
            Event(do="drain", at_s=1, node="n0"),
            Event(do="stop", at_s=2, node="n1", for_s=99),
            Event(do="kill", at_s=3, count=2),
        ),
    )
    deeds = run(plan, FakeNodes(4))
    assert {node for deed, node, _ in deeds if deed == "kill"} == {"n2", "n3"}


def test_events_wait_for_a_step_of_the_run_and_are_logged_with_it() -> None:
    steps = iter(range(100))
    plan = Plan(events=(Event(do="kill", at_step=7), Event(do="add", at_step=9)))
    chaos = Chaos(FakeNodes(3), plan, last_step=lambda: next(steps), clock=FakeClock())
    assert [(each.deed, each.event, each.step) for each in chaos.run()] == [
        ("kill", 0, 7),
        ("add", 1, 9),
    ]


def test_an_early_end_lets_go_on_what_is_stopped_and_takes_away_what_is_drained() -> None:
    nodes = FakeNodes(3)
    plan = Plan(
        replace_after_s=1,
        events=(
            Event(do="drain", at_s=1, node="n0"),
            Event(do="stop", at_s=1, node="n1", for_s=60),
            Event(do="kill", at_s=600),
        ),
    )
    log: list[str] = []
    Chaos(nodes, plan, tell=lambda each: log.append(each.deed), clock=FakeClock()).run(
        until=lambda: len(log) == 2
    )
    assert log == ["drain", "stop", "take_away", "go_on"]
    assert nodes.live == ["n1", "n2"]


def test_one_by_one_without_a_plan() -> None:
    nodes = FakeNodes(3)
    chaos = Chaos(nodes)
    chaos.drain("n0", 60, take_away=False)
    assert [node.name for node in chaos.usable()] == ["n1", "n2"]
    taken = chaos.take_away("n0")
    assert taken is not None
    assert chaos.take_away("n0") is None
    assert chaos.kill("n1").node_id == "id-n1"
    assert chaos.add().node == "n3"
    with pytest.raises(ClusterError, match="n1 is not there; live: n2, n3"):
        chaos.kill("n1")


def test_as_a_context_it_works_in_a_thread_and_ends_with_the_block() -> None:
    killed = threading.Event()
    plan = Plan(events=(Event(do="kill", at_s=0), Event(do="kill", at_s=9999)))
    with Chaos(FakeNodes(3), plan, tell=lambda each: killed.set()) as chaos:
        assert killed.wait(30)
    assert [each.deed for each in chaos.log] == ["kill"]
