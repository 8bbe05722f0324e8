"""The pin of Ray's private interfaces: each test names what an upgrade has changed.

What they do together is seen on real clusters in ``tests/train/test_elastic.py``.
"""

from __future__ import annotations

import inspect
import socket
from importlib.metadata import version
from typing import Any

import pytest
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import autoscaler_pb2, gcs_pb2, gcs_service_pb2, node_manager_pb2
from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub
from ray.core.generated.gcs_service_pb2_grpc import (
    InternalKVGcsServiceStub,
    NodeInfoGcsServiceStub,
)
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator
from ray.train import ScalingConfig, WorkerGroupError
from ray.train.v2._internal.callbacks.backend_setup import BackendSetupCallback
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, ScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ebbtide.platform import ray_seam
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.ray_seam import CONTROLLER_ENVIRONMENT, ElasticTrainer, ProcessLost


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_ray_is_the_version_that_this_seam_was_written_for() -> None:
    assert ray.__version__ == version("ray") == "2.60.0"


def test_the_trainer_starts_its_controller_through_one_method_with_policies() -> None:
    source = inspect.getsource(DataParallelTrainer.fit)
    assert "_initialize_and_run_controller(" in source
    assert {"scaling_policy", "failure_policy"} <= set(parameters(TrainController.__init__))
    for name in ("run", "abort", "get_result", "get_state", "_step"):
        assert callable(getattr(TrainController, name)), name


def test_the_controller_asks_the_policies_through_these_methods() -> None:
    assert parameters(ScalingPolicy.make_decision_for_running_worker_group) == [
        "self",
        "worker_group_state",
        "worker_group_status",
    ]
    assert parameters(ScalingPolicy.make_decision_for_non_running_worker_group) == ["self"]
    for name in ("_maybe_send_resource_request", "_send_resource_request", "_get_resize_decision"):
        assert callable(getattr(ElasticScalingPolicy, name)), name


def test_a_node_is_counted_as_ray_counts_it() -> None:
    policy = ElasticScalingPolicy(
        ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 2, "x": 1})
    )
    assert policy._count_possible_workers({"n": {"CPU": 5.0, "x": 9.0}}) == 2


def test_the_coordinator_recomputes_when_asked() -> None:
    coordinator = default_autoscaling_coordinator._AutoscalingCoordinatorActor
    assert parameters(coordinator.get_reserved_resources) == ["self", "requester_id", "recompute"]


def test_the_environment_reaches_controller_and_workers() -> None:
    assert CONTROLLER_ENVIRONMENT.keys() <= ENV_VARS_TO_PROPAGATE


def test_the_backend_is_taken_down_through_on_shutdown() -> None:
    source = inspect.getsource(BackendSetupCallback.before_execution_group_shutdown)
    assert "on_shutdown" in source
    assert ray_seam._KilledTorchConfig().backend_cls is ray_seam._KillWorkers


def test_the_default_callbacks_can_be_chosen_from() -> None:
    source = inspect.getsource(DataParallelTrainer._create_default_callbacks)
    assert "WorkingDirectorySetupCallback" in source
    assert "PlacementGroupCleanerCallback" in source
    assert issubclass(ElasticTrainer, DataParallelTrainer)


def test_ranks_errors_are_told_from_lost_processes() -> None:
    text = "The actor died unexpectedly.\n\tpid: 1\nThe actor died because its node has died. X"
    lost = WorkerHealthCheckFailedError("A worker health check failed.", failure=Exception(text))
    errors = ray_seam.rank_errors(WorkerGroupError("", {0: lost, 1: ValueError("boom")}))
    assert isinstance(errors[0], ProcessLost)
    assert str(errors[0]) == "The actor died because its node has died. X"
    assert isinstance(errors[1], ValueError)
    assert ray_seam.rank_errors(RuntimeError("else")) == {}


def test_the_control_service_has_what_is_asked_of_it() -> None:
    channel = init_grpc_channel("127.0.0.1:1")
    for stub, calls in (
        (NodeInfoGcsServiceStub, ("GetAllNodeInfo",)),
        (AutoscalerStateServiceStub, ("DrainNode",)),
        (InternalKVGcsServiceStub, ("InternalKVPut", "InternalKVDel", "InternalKVMultiGet")),
    ):
        for name in calls:
            assert callable(getattr(stub(channel), name)), name


def test_a_control_service_that_is_not_there_is_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_seam, "_GCS_TIMEOUT_S", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        service = ray_seam.ControlService(f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ClusterError, match="control service does not answer: "):
            service.drain("ab" * 28, 0.0, "a reason")


def test_messages_have_the_fields_that_are_used() -> None:
    assert gcs_pb2.GcsNodeInfo.GcsNodeState.Value("ALIVE") == 0
    for message, names in (
        (gcs_pb2.GcsNodeInfo, {"node_id", "node_manager_address", "state", "labels"}),
        (gcs_service_pb2.GetAllNodeInfoReply, {"status", "node_info_list"}),
        (gcs_service_pb2.InternalKVPutRequest, {"key", "value", "overwrite", "namespace"}),
        (gcs_service_pb2.InternalKVDelRequest, {"key", "namespace"}),
        (gcs_service_pb2.InternalKVMultiGetRequest, {"keys", "namespace"}),
        (gcs_service_pb2.InternalKVMultiGetReply, {"status", "results"}),
        (
            autoscaler_pb2.DrainNodeRequest,
            {"node_id", "reason", "reason_message", "deadline_timestamp_ms"},
        ),
        (autoscaler_pb2.DrainNodeReply, {"is_accepted", "rejection_reason_message"}),
        (
            node_manager_pb2.PrestartWorkersRequest,
            {"language", "job_id", "runtime_env_info", "keep_alive_duration_secs"},
        ),
    ):
        assert names <= {field.name for field in message.DESCRIPTOR.fields}, message
    assert autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def test_draining_nodes_are_known_to_a_driver() -> None:
    assert callable(ray._private.state.state.get_draining_nodes)


def test_busy_workers_are_told_from_idle_ones_and_from_rays_own_processes() -> None:
    assert ray_seam.is_busy_worker("ray::RayTrainWorker.execute")
    for title in ("ray::IDLE", "ray::IDLE_SpillWorker", "ray::SPILL_SpillWorker", "raylet"):
        assert not ray_seam.is_busy_worker(title), title
    for title in ("ray::DashboardAgent", "ray::RuntimeEnvAgent"):
        assert not ray_seam.is_busy_worker(title), title
