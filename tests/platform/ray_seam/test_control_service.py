"""Ray's control service has the calls and messages that are used, and never keeps one waiting."""

from __future__ import annotations

import socket

import pytest

from ebbtide.platform.errors import ClusterError
from tests.platform.ray_seam.pins import Pins

PINS = Pins("control_service")
GENERATED = "ray.core.generated"


@pytest.mark.parametrize(
    ("stub", "calls"),
    [
        ("gcs_service_pb2_grpc:NodeInfoGcsServiceStub", ["GetAllNodeInfo"]),
        ("autoscaler_pb2_grpc:AutoscalerStateServiceStub", ["DrainNode"]),
        (
            "gcs_service_pb2_grpc:InternalKVGcsServiceStub",
            ["InternalKVPut", "InternalKVDel", "InternalKVMultiGet"],
        ),
    ],
)
def test_service_has(stub: str, calls: list[str]) -> None:
    made = PINS.find(f"{GENERATED}.{stub}")(PINS.own("init_grpc_channel")("127.0.0.1:1"))
    PINS.knows(vars(made), calls, stub)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("gcs_pb2:GcsNodeInfo", ["node_id", "node_manager_address", "state", "labels"]),
        ("gcs_service_pb2:GetAllNodeInfoReply", ["status", "node_info_list"]),
        ("gcs_service_pb2:InternalKVPutRequest", ["key", "value", "overwrite", "namespace"]),
        ("gcs_service_pb2:InternalKVDelRequest", ["key", "namespace"]),
        ("gcs_service_pb2:InternalKVMultiGetRequest", ["keys", "namespace"]),
        ("gcs_service_pb2:InternalKVMultiGetReply", ["status", "results"]),
        (
            "autoscaler_pb2:DrainNodeRequest",
            ["node_id", "reason", "reason_message", "deadline_timestamp_ms"],
        ),
        ("autoscaler_pb2:DrainNodeReply", ["is_accepted", "rejection_reason_message"]),
    ],
)
def test_message_has(message: str, fields: list[str]) -> None:
    known = {field.name for field in PINS.find(f"{GENERATED}.{message}").DESCRIPTOR.fields}
    PINS.knows(known, fields, message)


def test_a_living_node_and_the_reason_of_a_drain_have_their_names() -> None:
    PINS.find(f"{GENERATED}.gcs_pb2:GcsNodeInfo.ALIVE")
    reasons = PINS.find(f"{GENERATED}.autoscaler_pb2:DrainNodeReason").keys()
    PINS.knows(reasons, ["DRAIN_NODE_REASON_PREEMPTION"], "DrainNodeReason")


def test_a_control_service_that_is_not_there_is_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PINS.own(""), "_TIMEOUT_S", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        service = PINS.own("ControlService")(f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ClusterError, match="control service does not answer: "):
            service.drain("ab" * 28, 0.0, "a reason")
