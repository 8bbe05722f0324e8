"""The Ray nodes of this machine, and what the agent on it tells their clusters."""

from __future__ import annotations

from ebbtide.platform.ray_seam.control_service import ControlService
from ebbtide.platform.ray_seam.raylets import Raylet, raylets_here


class OwnNodes:
    """All nodes on this machine, or the one of ``node_id``; each asked for at its own cluster."""

    def __init__(self, node_id: str | None = None) -> None:
        self._node_id = node_id

    def here(self) -> list[Raylet]:
        """The nodes that go when this machine goes."""
        return [each for each in raylets_here() if self._node_id in (None, each.node_id)]

    def drain(self, node: Raylet, deadline_s: float, reason: str) -> None:
        """Announce the node's end. Raises ClusterError."""
        ControlService(node.control_service).drain(node.node_id, deadline_s, reason)

    def recommend_leaving(self, node: Raylet, since_s: float | None) -> None:
        """Tell the cluster since when the node is at risk; None takes it back.

        Raises ClusterError."""
        ControlService(node.control_service).recommend_leaving(node.node_id, since_s)
