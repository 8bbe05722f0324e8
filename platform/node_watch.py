"""Eviction notices reach Ray: asks the metadata service for ever, and drains this machine's nodes.

Promises: a notice is drained with its own deadline, again if it changes, and also on a node that
joins the machine after it; as long as it is not, it is tried again every second, and everything
else every five; one trouble is told once, and once more when it is over; nothing but a signal ends
the watch. A notice is not taken back in Ray, which has no such call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import ClusterError, MetadataError
from ebbtide.platform.metadata_service import MetadataService
from ebbtide.platform.preemption import Notice, next_poll_s, read_notice, read_rebalance
from ebbtide.platform.ray_seam.raylets import Raylet

_WAIT_S = 20.0  # of a long-polling request
_DETECT_S = 30.0
_MIN_LEFT_S = 1.0  # Ray wants a deadline that is still to come


@dataclass(frozen=True)
class Report:
    """What the watch tells: one JSON line each, with ``message`` for people."""

    event: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Nodes(Protocol):
    """The Ray nodes of this machine. Both actions raise ClusterError and may be repeated."""

    def here(self) -> list[Raylet]:
        """The nodes that go when this machine goes."""

    def drain(self, node: Raylet, deadline_s: float, reason: str) -> None:
        """Announce the node's end."""

    def recommend_leaving(self, node: Raylet, since_s: float | None) -> None:
        """Tell the cluster that the node has been at risk since then; None takes it back."""


class NodeWatch:
    """``connect`` gives the metadata service, or None as long as there is none."""

    def __init__(
        self,
        connect: Callable[[], MetadataService | None],
        nodes: Nodes,
        report: Callable[[Report], None],
        clock: Clock,
    ) -> None:
        self._connect, self._nodes, self._report, self._clock = connect, nodes, report, clock
        self._service: MetadataService | None = None
        self._text: str | None = None
        self._notice: Notice | None = None
        self._drained: set[str] = set()
        self._at_risk_since_s: float | None = None
        self._marked: set[str] = set()
        self._troubles: set[str] = set()

    def run(self) -> None:
        """Never returns."""
        while True:
            self._clock.sleep(self.poll())

    def poll(self) -> float:
        """One round. Returns how many seconds to wait before the next."""
        service = self._service or self._find()
        if service is None:
            return _DETECT_S
        began_s = self._clock.monotonic()
        self._ask_for_notice(service)
        self._ask_for_rebalance(service)
        took_s = self._clock.monotonic() - began_s
        done = (self._drain(), self._mark())
        return next_poll_s(took_s, pending=not all(done))

    def _find(self) -> MetadataService | None:
        self._service = self._connect()
        if self._service is None:
            self._trouble("cloud", "no metadata service of AWS or GCP answers; still asking")
        else:
            self._over("cloud")
            cloud = self._service.cloud
            self._tell("watching", f"watching {cloud} for eviction notices", cloud=cloud)
        return self._service

    def _ask_for_notice(self, service: MetadataService) -> None:
        unfinished = self._notice is not None and bool(self._undrained())
        try:
            text = service.interruption(0.0 if unfinished or self._unmarked() else _WAIT_S)
            if text is None:
                self._withdraw()
            elif text != self._text:
                self._notice = read_notice(service.cloud, text, self._clock.time())
                self._text, self._drained = text, set()
                self._tell_notice(service.cloud, self._notice)
        except MetadataError as error:
            self._trouble("interruption", str(error))
        else:
            self._over("interruption")

    def _tell_notice(self, cloud: str, notice: Notice) -> None:
        left_s = notice.deadline_s - self._clock.time()
        doubt = f" ({notice.doubt})" if notice.doubt else ""
        self._tell(
            "notice",
            f"{cloud} announces: {notice.action} in {left_s:.0f} s{doubt}",
            action=notice.action,
            deadline_s=notice.deadline_s,
            doubt=notice.doubt,
        )

    def _withdraw(self) -> None:
        if self._notice is not None:
            drained = "; drained nodes stay drained" if self._drained else ""
            self._tell("withdrawn", f"the notice is withdrawn{drained}")
            self._text, self._notice, self._drained = None, None, set()

    def _undrained(self) -> list[Raylet]:
        return [node for node in self._nodes.here() if node.node_id not in self._drained]

    def _drain(self) -> bool:
        """Drain the nodes that are not yet; whether there is nothing left to do."""
        if self._notice is not None:
            nodes = self._undrained()
            if not nodes and not self._drained:
                self._trouble("drain", "no Ray node is found on this machine; still looking")
                return False
            if not all([self._drain_node(node, self._notice) for node in nodes]):
                return False
        self._over("drain")
        return True

    def _drain_node(self, node: Raylet, notice: Notice) -> bool:
        deadline_s = max(notice.deadline_s, self._clock.time() + _MIN_LEFT_S)
        try:
            self._nodes.drain(node, deadline_s, f"spot eviction: {notice.action}")
        except ClusterError as error:
            self._trouble("drain", f"{error}; still trying")
            return False
        self._drained.add(node.node_id)
        left_s = deadline_s - self._clock.time()
        self._tell(
            "draining",
            f"node {node.node_id} is draining; {left_s:.0f} s left",
            node_id=node.node_id,
            deadline_s=deadline_s,
        )
        return True

    def _ask_for_rebalance(self, service: MetadataService) -> None:
        try:
            text = service.rebalance()
            since_s = None if text is None else read_rebalance(text)
        except MetadataError as error:
            self._trouble("rebalance", str(error))
            return
        self._over("rebalance")
        if since_s != self._at_risk_since_s:
            what = "takes back that it recommends" if since_s is None else "recommends"
            message = f"{service.cloud} {what} to leave this machine"
            self._tell("rebalance", message, since_s=since_s)
            if since_s is not None:
                self._marked = set()
            self._at_risk_since_s = since_s

    def _unmarked(self) -> list[Raylet]:
        """The nodes whose mark in the cluster is not what it should be."""
        wanted = self._at_risk_since_s is not None
        if not wanted and not self._marked:
            return []
        return [each for each in self._nodes.here() if (each.node_id in self._marked) != wanted]

    def _mark(self) -> bool:
        """Mark the nodes at risk, or take that back; whether there is nothing left to do."""
        failed = False
        for node in self._unmarked():
            try:
                self._nodes.recommend_leaving(node, self._at_risk_since_s)
                self._marked ^= {node.node_id}
            except ClusterError as error:
                self._trouble("mark", f"{error}; still trying")
                failed = True
        if not failed:
            self._over("mark")
        return not failed

    def _trouble(self, source: str, message: str) -> None:
        if source not in self._troubles:
            self._troubles.add(source)
            self._tell("trouble", message, source=source)

    def _over(self, source: str) -> None:
        if source in self._troubles:
            self._troubles.remove(source)
            self._tell("recovered", f"{source}: the trouble is over", source=source)

    def _tell(self, event: str, message: str, **fields: Any) -> None:
        self._report(Report(event, message, fields))
