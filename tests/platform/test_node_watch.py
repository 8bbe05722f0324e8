"""The watch: what it tells Ray, what it tells people, and how often it asks."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from ebbtide.platform.clock import FakeClock, SystemClock
from ebbtide.platform.errors import ClusterError, MetadataError
from ebbtide.platform.local_metadata import LocalMetadata
from ebbtide.platform.metadata_service import Cloud, MetadataService, connect
from ebbtide.platform.node_watch import NodeWatch, Report
from ebbtide.platform.ray_seam.raylets import Raylet

NOW_S = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()
TERMINATE = '{"action": "terminate", "time": "2026-03-01T12:02:00Z"}'


class Service:
    """Says what it is told to; an exception is raised."""

    def __init__(self, cloud: Cloud = "aws") -> None:
        self.cloud: Cloud = cloud
        self.says: str | None | MetadataError = None
        self.recommends: str | None | MetadataError = None
        self.waits: list[float] = []

    def interruption(self, wait_s: float) -> str | None:
        self.waits.append(wait_s)
        if isinstance(self.says, MetadataError):
            raise self.says
        return self.says

    def rebalance(self) -> str | None:
        if isinstance(self.recommends, MetadataError):
            raise self.recommends
        return self.recommends


class FakeNodes:
    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.drained: list[tuple[str, float]] = []
        self.at_risk: dict[str, float] = {}
        self.trouble: str | None = None
        self.unreachable: set[str] = set()

    def here(self) -> list[Raylet]:
        return [Raylet(1, 1, name, "head:6379") for name in self.names]

    def drain(self, node: Raylet, deadline_s: float, reason: str) -> None:
        if self.trouble or node.node_id in self.unreachable:
            raise ClusterError(self.trouble or "its head does not answer")
        self.drained.append((node.node_id, deadline_s))

    def recommend_leaving(self, node: Raylet, since_s: float | None) -> None:
        if self.trouble:
            raise ClusterError(self.trouble)
        if since_s is None:
            del self.at_risk[node.node_id]
        else:
            self.at_risk[node.node_id] = since_s


class World:
    """A watch over fakes; ``poll`` counts the rounds that end with each event."""

    def __init__(self, *names: str, connects: bool = True) -> None:
        self.service, self.nodes = Service(), FakeNodes(*names)
        self.clock, self.reports = FakeClock(NOW_S), list[Report]()
        self.connects = connects
        self.watch = NodeWatch(self._connect, self.nodes, self.reports.append, self.clock)

    def _connect(self) -> MetadataService | None:
        return self.service if self.connects else None

    def poll(self, rounds: int = 1) -> list[str]:
        """The events of these rounds."""
        before = len(self.reports)
        for _ in range(rounds):
            self.clock.sleep(self.watch.poll())
        return [report.event for report in self.reports[before:]]


def test_a_notice_drains_every_node_of_the_machine_once_with_its_deadline() -> None:
    world = World("a", "b")
    assert world.poll(3) == ["watching"]
    world.service.says = TERMINATE
    assert world.poll(10) == ["notice", "draining", "draining"]
    assert world.nodes.drained == [("a", NOW_S + 120), ("b", NOW_S + 120)]


def test_polls_are_five_seconds_apart() -> None:
    world = World("a")
    world.poll(10)
    assert world.clock.now_s == NOW_S + 50


def test_a_changed_notice_and_a_node_that_joins_later_are_drained_too() -> None:
    world = World("a")
    world.service.says = TERMINATE
    world.poll(2)
    world.service.says = TERMINATE.replace("12:02:00", "12:01:30")
    world.poll(2)
    world.nodes.names.append("b")
    world.poll(2)
    assert world.nodes.drained == [("a", NOW_S + 120), ("a", NOW_S + 90), ("b", NOW_S + 90)]


def test_a_notice_that_is_taken_back_is_told_and_the_next_one_is_drained() -> None:
    world = World("a")
    world.service.says = TERMINATE
    world.poll()
    world.service.says = None
    assert world.poll(3) == ["withdrawn"]
    world.service.says = TERMINATE
    assert world.poll(3) == ["notice", "draining"]


def test_a_cluster_that_cannot_be_reached_is_tried_every_second_and_told_once() -> None:
    world = World("a")
    world.service.says, world.nodes.trouble = TERMINATE, "head:6379 does not answer"
    assert world.poll(30) == ["watching", "notice", "trouble"]
    assert world.clock.now_s == NOW_S + 30
    assert set(world.service.waits[1:]) == {0.0}  # it does not wait while there is work
    world.nodes.trouble = None
    assert world.poll(3) == ["draining", "recovered"]
    assert world.nodes.drained == [("a", NOW_S + 120)]


def test_a_node_whose_cluster_is_gone_does_not_keep_the_others_back() -> None:
    world = World("gone", "b")
    world.service.says, world.nodes.unreachable = TERMINATE, {"gone"}
    assert world.poll(5) == ["watching", "notice", "trouble", "draining"]
    assert world.nodes.drained == [("b", NOW_S + 120)]


def test_a_drain_that_comes_after_the_deadline_still_has_one_to_come() -> None:
    world = World("a")
    world.service.says, world.nodes.trouble = TERMINATE, "down"
    world.poll(200)
    world.nodes.trouble = None
    world.poll()
    assert world.nodes.drained == [("a", NOW_S + 201)]


def test_a_machine_without_a_node_is_told_once_and_its_node_is_drained_when_it_comes() -> None:
    world = World()
    world.service.says = TERMINATE
    assert world.poll(5) == ["watching", "notice", "trouble"]
    world.nodes.names.append("a")
    assert world.poll(3) == ["draining", "recovered"]


def test_a_service_that_fails_or_talks_nonsense_is_told_once_and_asked_on() -> None:
    world = World("a")
    world.service.says = MetadataError("does not answer")
    assert world.poll(5) == ["watching", "trouble"]
    world.service.says = "<html>"
    assert world.poll(5) == []
    assert world.clock.now_s == NOW_S + 50
    world.service.says = TERMINATE
    assert world.poll() == ["notice", "recovered", "draining"]
    world.service.says = MetadataError("does not answer")
    assert world.poll(5) == ["trouble"]
    assert world.nodes.drained == [("a", NOW_S + 120)]


def test_a_failing_recommendation_does_not_keep_the_notice_back() -> None:
    world = World("a")
    world.service.recommends, world.service.says = MetadataError("HTTP 500"), TERMINATE
    world.poll()
    assert world.nodes.drained == [("a", NOW_S + 120)]


def test_a_recommendation_is_marked_on_every_node_and_taken_back() -> None:
    world = World("a")
    world.service.recommends = '{"noticeTime": "2026-03-01T12:00:00Z"}'
    assert world.poll(3) == ["watching", "rebalance"]
    world.nodes.names.append("b")
    assert world.poll(3) == []
    assert world.nodes.at_risk == {"a": NOW_S, "b": NOW_S}
    assert world.nodes.drained == []
    world.service.recommends = None
    assert world.poll(3) == ["rebalance"]
    assert world.nodes.at_risk == {}


def test_no_metadata_service_is_told_once_and_looked_for_on() -> None:
    world = World("a", connects=False)
    assert world.poll(5) == ["trouble"]
    assert world.clock.now_s == NOW_S + 150
    world.connects = True
    assert world.poll(2) == ["recovered", "watching"]


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_the_notice_goes_the_whole_way_over_a_real_socket(cloud: Cloud) -> None:
    nodes, reports, clock = FakeNodes("a"), list[Report](), SystemClock()
    with LocalMetadata(cloud) as server:
        watch = NodeWatch(
            lambda: connect("auto", server.endpoint, clock), nodes, reports.append, clock
        )
        watch.poll()
        now_s = int(time.time())
        server.instance.preempt()
        server.instance.interrupt("stop", f"{datetime.fromtimestamp(now_s + 100, UTC):%FT%TZ}")
        server.instance.expire_tokens()
        watch.poll()
    assert [report.event for report in reports] == ["watching", "notice", "draining"]
    [(name, deadline_s)] = nodes.drained
    expected_s = now_s + 100 if cloud == "aws" else time.time() + 30
    assert name == "a"
    assert deadline_s == pytest.approx(expected_s, abs=0 if cloud == "aws" else 10)
