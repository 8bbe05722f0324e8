"""The worker nodes of a local cluster, for whoever wants to do them harm, from any process.

They are found by the label that :class:`LocalCluster` gives them and by their processes on this
machine; a cluster without such nodes is refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ebbtide.platform import node_memory, process_session
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_door import ask_for_node
from ebbtide.platform.nodes import LABEL_LOCAL_NODE
from ebbtide.platform.ray_seam.control_service import ControlService
from ebbtide.platform.ray_seam.raylets import Raylet, raylets_here
from ebbtide.platform.ray_seam.workers import is_busy_worker


@dataclass(frozen=True)
class LocalNode:
    """A live node; ``session`` is that of all its processes."""

    name: str
    node_id: str
    session: int


class LocalNodes:
    """Of the local cluster at ``address`` (HOST:PORT of its GCS). Raises ClusterError."""

    def __init__(self, address: str) -> None:
        self._address = address
        here = raylets_here()
        if not self._raylets(here):
            others = sorted({each.control_service for each in here})
            running = f"; on this machine there are: {', '.join(others)}" if others else ""
            raise ClusterError(f"{address}: no node of this cluster runs on this machine{running}")
        self._control = ControlService(address)
        if not any(LABEL_LOCAL_NODE in node.labels for node in self._control.nodes()):
            raise ClusterError(
                f"{address}: not a local cluster of ebbtide's (no node has the label "
                f"{LABEL_LOCAL_NODE}); nodes of other clusters are left alone"
            )

    def nodes(self) -> list[LocalNode]:
        """The live worker nodes, by number."""
        raylets = self._raylets(raylets_here())
        found = [
            LocalNode(node.labels[LABEL_LOCAL_NODE], node.node_id, raylets[node.node_id].session)
            for node in self._control.nodes()
            if node.alive and LABEL_LOCAL_NODE in node.labels and node.node_id in raylets
        ]
        return sorted(found, key=lambda node: (len(node.name), node.name))

    def busy_workers(self, node: LocalNode, named: str = "") -> list[int]:
        """The node's worker processes that hold an actor or run a task, with ``named`` in their
        title."""
        found = []
        for pid in process_session.processes(node.session):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                title = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace")
                if is_busy_worker(title) and named in title:
                    found.append(pid)
        return sorted(found)

    def drain(self, node: LocalNode, deadline_s: float) -> None:
        """Announce the node's end at ``deadline_s`` (epoch seconds). It is not ended."""
        self._control.drain(node.node_id, deadline_s, "spot eviction")

    def kill(self, node: LocalNode) -> None:
        """SIGKILL every process of the node; what was in its memory is gone."""
        process_session.kill_all(node.session)
        node_memory.remove(node.node_id)

    def kill_worker(self, pid: int) -> None:
        """SIGKILL one process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self, node: LocalNode) -> Callable[[], None]:
        """SIGSTOP every process of the node; what is returned lets them go on."""
        process_session.signal_all(node.session, signal.SIGSTOP)

        def go_on() -> None:
            process_session.signal_all(node.session, signal.SIGCONT)

        return go_on

    def stop_worker(self, pid: int) -> Callable[[], None]:
        """SIGSTOP one process; what is returned lets it go on, and may be called once."""
        handle = os.pidfd_open(pid)  # the number may be another's by the time it goes on
        signal.pidfd_send_signal(handle, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)

        return go_on

    def add(self) -> str:
        """Add a node and wait until it has joined; its name. The cluster's owner starts it."""
        leader = next(iter(self._raylets(raylets_here()).values())).session
        environment = Path("/proc", str(leader), "environ").read_bytes().decode(errors="replace")
        variables = dict(line.partition("=")[::2] for line in environment.split("\0"))
        return ask_for_node(Path(variables["RAY_TMPDIR"]))

    def _raylets(self, raylets: list[Raylet]) -> dict[str, Raylet]:
        return {each.node_id: each for each in raylets if each.control_service == self._address}
