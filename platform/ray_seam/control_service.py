"""A cluster's control service (GCS), asked directly: no driver has to be connected.

Promises: an answer, or ClusterError within seconds. Ray's own client of the GCS waits for minutes
instead, and may end the process that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]  # no stubs
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.autoscaler_pb2 import DrainNodeReason, DrainNodeRequest
from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2 import (
    GetAllNodeInfoRequest,
    InternalKVDelRequest,
    InternalKVMultiGetRequest,
    InternalKVPutRequest,
)
from ray.core.generated.gcs_service_pb2_grpc import (
    InternalKVGcsServiceStub,
    NodeInfoGcsServiceStub,
)

from ebbtide.platform.errors import ClusterError

_TIMEOUT_S = 5.0
_AT_RISK = b"ebbtide.dev/at-risk"


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster's control service (GCS) lists it."""

    node_id: str
    address: str
    alive: bool
    labels: Mapping[str, str]


class ControlService:
    """That of the cluster at ``address`` (HOST:PORT). Every method raises ClusterError."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = init_grpc_channel(address)

    def nodes(self) -> list[RayNode]:
        """Every node that has registered, dead ones included."""
        call = NodeInfoGcsServiceStub(self._channel).GetAllNodeInfo
        return [
            RayNode(
                node_id=info.node_id.hex(),
                address=info.node_manager_address,
                alive=info.state == GcsNodeInfo.ALIVE,
                labels=dict(info.labels),
            )
            for info in self._ask(call, GetAllNodeInfoRequest()).node_info_list
        ]

    def drain(self, node_id: str, deadline_s: float, message: str) -> None:
        """Announce that a node will be taken away at ``deadline_s`` (epoch seconds).

        It may be repeated. A node without work ends at once, and so does any at its deadline."""
        request = DrainNodeRequest(
            node_id=bytes.fromhex(node_id),
            reason=DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            reason_message=message,
            deadline_timestamp_ms=int(deadline_s * 1000),
        )
        reply = self._ask(AutoscalerStateServiceStub(self._channel).DrainNode, request)
        if not reply.is_accepted:
            raise ClusterError(
                f"{self._address}: node {node_id} cannot be drained: "
                f"{reply.rejection_reason_message}"
            )

    def recommend_leaving(self, node_id: str, since_s: float | None) -> None:
        """Mark a node as at risk since then (epoch seconds); None takes the mark away."""
        service = InternalKVGcsServiceStub(self._channel)
        where = {"key": node_id.encode(), "namespace": _AT_RISK}
        if since_s is None:
            self._ask(service.InternalKVDel, InternalKVDelRequest(**where))
        else:
            value = repr(since_s).encode()
            request = InternalKVPutRequest(**where, value=value, overwrite=True)
            self._ask(service.InternalKVPut, request)

    def nodes_at_risk(self) -> dict[str, float]:
        """Live nodes that the cloud recommends to leave, with since when (epoch seconds)."""
        service = InternalKVGcsServiceStub(self._channel)
        alive = [node.node_id.encode() for node in self.nodes() if node.alive]
        request = InternalKVMultiGetRequest(keys=alive, namespace=_AT_RISK)
        marks = self._ask(service.InternalKVMultiGet, request).results
        return {mark.key.decode(): float(mark.value) for mark in marks}

    def _ask(self, call: Any, request: Any) -> Any:
        try:
            reply = call(request, timeout=_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ClusterError(
                f"{self._address}: the cluster's control service does not answer: "
                f"{error.code().name}: {error.details()}"
            ) from error
        status = getattr(reply, "status", None)  # not in every message
        if status is not None and status.code:
            raise ClusterError(f"{self._address}: {status.message}")
        return reply
