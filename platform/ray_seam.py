"""Every interface of Ray that is not public, in one place.

Ray is pinned; ``tests/platform/test_ray_seam.py`` fails by name when an upgrade changes what is used
here. No other module of the project may import from ``ray._private``, ``ray._raylet``,
``ray.core.generated`` or ``ray.train.v2._internal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.platform.errors import ClusterError


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster's control service (GCS) lists it."""

    node_id: str
    address: str
    alive: bool
    labels: Mapping[str, str]


class ControlService:
    """A cluster's GCS, asked directly: this process need not be connected as a driver."""

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient

        self._address = address
        self._client = GcsClient(address=address)

    def nodes(self) -> list[RayNode]:
        """Every node that has registered, dead ones included."""
        return [
            RayNode(
                node_id=node_id.hex(),
                address=info.node_manager_address,
                alive=info.state == 0,  # GcsNodeInfo.ALIVE
                labels=dict(info.labels),
            )
            for node_id, info in self._client.get_all_node_info().items()
        ]

    def drain(self, node_id: str, deadline_s: float, message: str) -> None:
        """Announce that a node will be taken away at ``deadline_s`` (epoch seconds)."""
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        accepted, why = self._client.drain_node(
            node_id,
            DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            message,
            int(deadline_s * 1000),
        )
        if not accepted:
            raise ClusterError(f"{self._address}: node {node_id} cannot be drained: {why}")
