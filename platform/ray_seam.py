"""Every interface of Ray that is not public, in one place.

Ray is pinned; ``tests/platform/test_ray_seam.py`` fails by name when an upgrade changes what is
used here. No other module of the project but ``ray_output`` may import from ``ray._private``,
``ray._raylet``, ``ray.core.generated`` or ``ray.train.v2._internal``.

:class:`ElasticTrainer` is Ray Train's ``TorchTrainer`` with the two decisions of its controller
taken by objects of ours (how many workers, and whether to go on after a failure), with settings
that recover in seconds, and with workers that are killed, not asked, when a group is ended. Ray's
own watcher of preemptions is off: it would wait for the deadline of a notice before restarting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]  # no stubs
import ray
import ray.exceptions
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import (
    AGENT_PROCESS_TYPE_DASHBOARD_AGENT,
    AGENT_PROCESS_TYPE_RUNTIME_ENV_AGENT,
    WORKER_PROCESS_SETUP_HOOK_ENV_VAR,
    WORKER_PROCESS_TYPE_IDLE_WORKER,
)
from ray._private.state import state as cluster_state
from ray._private.worker import get_dashboard_url
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, not in its stub
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray.core.generated.autoscaler_pb2 import DrainNodeReason, DrainNodeRequest
from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub
from ray.core.generated.common_pb2 import Language
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
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.train import (
    ControllerError,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ScalingDecision,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ebbtide.platform.errors import ClusterError

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 0.5
_ABORT_TIMEOUT_S = 20.0
_COORDINATOR_TIMEOUT_S = 5.0
_TICK_S = 0.5
_PRESTART_TIMEOUT_S = 10.0
_GCS_TIMEOUT_S = 5.0
_NOT_BUSY = (
    WORKER_PROCESS_TYPE_IDLE_WORKER,
    AGENT_PROCESS_TYPE_DASHBOARD_AGENT,
    AGENT_PROCESS_TYPE_RUNTIME_ENV_AGENT,
    "ray::SPILL_",
    "ray::RESTORE_",
    "ray::DELETE_",
)
_AT_RISK = b"ebbtide.dev/at-risk"
_KEEP_PRESTARTED_S = 7 * 24 * 3600

CONTROLLER_ENVIRONMENT: Mapping[str, str] = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # 2 s as it comes
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",  # 60 s as it comes
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""For the controller and its workers. Ray reads the time-out for placing the group only."""


# -- the cluster ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster's control service (GCS) lists it."""

    node_id: str
    address: str
    alive: bool
    labels: Mapping[str, str]


class ControlService:
    """A cluster's GCS, asked directly: this process need not be connected as a driver.

    Every method raises ClusterError if there is no answer within seconds. Ray's own client of the
    GCS waits for minutes instead, and may end the process that it is in.
    """

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
                alive=info.state == 0,  # GcsNodeInfo.ALIVE
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
            reply = call(request, timeout=_GCS_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ClusterError(
                f"{self._address}: the cluster's control service does not answer: "
                f"{error.code().name}: {error.details()}"
            ) from error
        status = getattr(reply, "status", None)  # not in every message
        if status is not None and status.code:
            raise ClusterError(f"{self._address}: {status.message}")
        return reply


@dataclass(frozen=True)
class AgentPorts:
    """The ports of a node's agents, where they are fixed ahead."""

    dashboard_listen: int
    dashboard_grpc: int
    runtime_env: int
    metrics: int

    def announce(self, session_dir: str, node_id: str) -> None:
        """Write them where the agents would. Without it a raylet gives up on agents that take 15 s.

        ``session_dir`` is the node's own and exists.
        """
        for name, port in (
            (DASHBOARD_AGENT_LISTEN_PORT_NAME, self.dashboard_listen),
            (METRICS_AGENT_PORT_NAME, self.dashboard_grpc),
            (RUNTIME_ENV_AGENT_PORT_NAME, self.runtime_env),
            (METRICS_EXPORT_PORT_NAME, self.metrics),
        ):
            persist_port(session_dir, node_id, name, port)


def node_id_environment(node_id: str) -> dict[str, str]:
    """The environment with which ``ray start`` gives a node this id."""
    return {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id}


def is_busy_worker(title: str) -> bool:
    """Whether a process with this title (its command line) holds an actor or runs a task."""
    return title.startswith("ray::") and not title.startswith(_NOT_BUSY)


def draining_nodes() -> dict[str, float | None]:
    """The nodes whose end is announced, with the deadline in epoch seconds if one was given."""
    return {
        node_id: deadline_ms / 1000 if deadline_ms else None
        for node_id, deadline_ms in cluster_state.get_draining_nodes().items()
    }


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node's raylet accepts connections: known at once, seconds before Ray knows."""
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, _PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def unreachable_nodes(node_ids: Sequence[str]) -> set[str]:
    """Those of the nodes that are dead, or do not answer."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    known = [alive[node_id] for node_id in node_ids if node_id in alive]
    with ThreadPoolExecutor(max(1, min(32, len(known)))) as pool:
        found = zip(known, pool.map(_answers, known), strict=True)
        answering = {node["NodeID"] for node, answers in found if answers}
    return set(node_ids) - answering


def hook_environment(hook: str) -> dict[str, str]:
    """The environment with which a worker process calls ``module.function`` before its first task.

    Ray has this as ``worker_process_setup_hook``, for whole jobs only.
    """
    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: hook}


def prestart_workers(node_id: str, count: int, runtime_env: str) -> None:
    """Have a node start idle worker processes for actors of this job, and keep them.

    ``runtime_env`` must be the actors' ``get_runtime_env_string()``, to the letter: only then are
    the processes taken for them. They end with the job. Raises ClusterError.
    """
    node = next((each for each in ray.nodes() if each["NodeID"] == node_id and each["Alive"]), None)
    if node is None:
        raise ClusterError(f"node {node_id} is not alive")
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        keep_alive_duration_secs=_KEEP_PRESTARTED_S,
        num_workers=count,
    )
    request.runtime_env_info.serialized_runtime_env = runtime_env
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    try:
        with init_grpc_channel(address) as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_PRESTART_TIMEOUT_S)
    except grpc.RpcError as error:
        raise ClusterError(
            f"node {node_id}: no worker is started ahead: {error.details()}"
        ) from error


# -- Ray Train -----------------------------------------------------------------------------------


class ProcessLost(Exception):
    """A rank's process is gone: killed, crashed, or its node is."""


@dataclass(frozen=True)
class NodeOffer:
    """A node that Ray reserves for the run, and how many workers fit on it.

    ``deadline_s`` is when a draining node is to be taken away (epoch seconds), if that is known.
    """

    node_id: str
    workers: int
    draining: bool = False
    reachable: bool = True
    deadline_s: float | None = None


class Scaling(Protocol):
    """Decides how many workers there are. Lives in the controller's actor; travels there."""

    def to_start(self, nodes: Sequence[NodeOffer]) -> int | None:
        """How many workers to start, no group running; None to ask again in half a second."""

    def to_resize(self, nodes: Sequence[NodeOffer]) -> int | None:
        """How many to go on with; None to leave the group alone. The group is killed at once."""

    def to_request(self, nodes: Sequence[NodeOffer]) -> int:
        """How many workers' resources to reserve, and to ask the cluster's autoscaler for."""


class Judge(Protocol):
    """Decides whether the run goes on after a failure. Lives in the controller's actor."""

    def go_on(self, errors: Mapping[int, Exception]) -> bool:
        """Restart, or end with these errors (by rank; :class:`ProcessLost` for a dead one)."""


class _KillWorkers(_TorchBackend):  # type: ignore[misc]  # untyped base
    """Sets the process group up as Ray does, and does not take it down: the ranks are killed."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        return None


class _KilledTorchConfig(TorchConfig):  # type: ignore[misc]  # untyped base
    @property
    def backend_cls(self) -> type[_KillWorkers]:
        return _KillWorkers


class _Policy(ElasticScalingPolicy):  # type: ignore[misc]  # untyped base
    """Ray's elastic policy with the counting and the decision given to :class:`Scaling`.

    Resources are still reserved with the cluster's coordinator, so that several runs share a
    cluster; but its view is brought up to date before it is asked (it refreshes every 20 s only).
    """

    def __init__(self, scaling_config: ScalingConfig, scaling: Scaling) -> None:
        super().__init__(scaling_config)
        self._scaling = scaling
        self._requested: int = scaling_config.max_workers

    def _get_num_workers_for_resource_request(self) -> int:
        return self._requested

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        return self._decision(self._scaling.to_start(self._offers(probe=True)))

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        return self._decision(self._scaling.to_resize(self._offers(probe=False)))

    def _decision(self, workers: int | None) -> ScalingDecision:
        return NoopDecision() if workers is None else self._get_resize_decision(workers)

    def _offers(self, probe: bool) -> list[NodeOffer]:
        reserved = self._reserved()
        draining = draining_nodes()
        unreachable = unreachable_nodes(list(reserved)) if probe else set()
        offers = [
            NodeOffer(
                node_id,
                self._count_possible_workers({node_id: resources}),
                node_id in draining,
                node_id not in unreachable,
                draining.get(node_id),
            )
            for node_id, resources in reserved.items()
        ]
        wanted = self._scaling.to_request(offers)
        if wanted != self._requested:
            self._requested = wanted
            self._send_resource_request()
        return offers

    def _reserved(self) -> dict[str, dict[str, float]]:
        try:
            answer = self._autoscaling_coordinator.get_reserved_resources.remote(
                self._requester_id, recompute=True
            )
            return dict(ray.get(answer, timeout=_COORDINATOR_TIMEOUT_S))
        except ray.exceptions.RayError as error:
            logger.warning("the cluster's resources cannot be asked for: %s", error)
            return {}


class _FailurePolicy(FailurePolicy):  # type: ignore[misc]  # untyped base
    """Failures to place a group are tried again for ever; those of its ranks are judged."""

    def __init__(self, failure_config: FailureConfig, judge: Judge) -> None:
        super().__init__(failure_config)
        self._judge = judge

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if isinstance(training_failed_error, ControllerError):
            why = training_failed_error.controller_failure
            if isinstance(why, WorkerGroupStartupFailedError | WorkerGroupStartupTimeoutError):
                return FailureDecision.RETRY
            if not isinstance(why, ray.exceptions.RayError):
                return FailureDecision.RAISE
            errors: dict[int, Exception] = {0: ProcessLost(f"the group did not come up: {why}")}
        else:
            errors = rank_errors(training_failed_error)
        go_on = bool(errors) and self._judge.go_on(errors)
        return FailureDecision.RETRY if go_on else FailureDecision.RAISE


class ElasticController(TrainController):  # type: ignore[misc]  # untyped base
    """Ray's controller, which while it waits for nodes would spin without ever listening."""

    async def _step(self) -> Any:
        before = self.get_state()
        result = await super()._step()
        if result.next_state is before:
            await asyncio.sleep(_TICK_S)
        return result


class ElasticTrainer(TorchTrainer):  # type: ignore[misc]  # untyped base
    """See the module. ``tick`` is called in the driver about twice a second while it runs.

    What ``tick`` raises, and an interrupt, end the run: the controller kills the ranks first.
    """

    def __init__(
        self,
        train: Callable[[], None],
        *,
        scaling: Scaling,
        judge: Judge,
        tick: Callable[[], None],
        scaling_config: ScalingConfig,
        run_config: RunConfig,
        process_group_timeout_s: int,
    ) -> None:
        super().__init__(
            train,
            torch_config=_KilledTorchConfig(timeout_s=process_group_timeout_s),
            scaling_config=scaling_config,
            run_config=run_config,
        )
        self._scaling, self._judge, self._tick = scaling, judge, tick

    def _create_default_callbacks(self) -> list[Any]:
        """Ray's, without what moves ranks away from their working directory, and without a process
        that watches over the placement group, which ends with this driver anyway."""
        unwanted = (
            WorkingDirectorySetupCallback | PlacementGroupCleanerCallback | StateManagerCallback
        )
        callbacks = [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, unwanted)
        ]
        if get_dashboard_url():
            callbacks.append(StateManagerCallback(datasets={}))
        return callbacks

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["scaling_policy"] = _Policy(self.scaling_config, self._scaling)
        arguments["failure_policy"] = _FailurePolicy(self.run_config.failure_config, self._judge)
        environment = {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # for its helpers' sake
            RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: "0",
            **CONTROLLER_ENVIRONMENT,
            **get_env_vars_to_propagate(),
        }
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controller = (
            ray.remote(ElasticController)
            .options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": environment})
            .remote(**arguments)
        )
        running = controller.run.remote()
        try:
            while not ray.wait([running], timeout=_TICK_S)[0]:
                self._tick()
            ray.get(running)
            self._tick()
            return ray.get(controller.get_result.remote())
        except BaseException:
            self._abort(controller)
            raise

    def _abort(self, controller: Any) -> None:
        try:
            ray.get(controller.abort.remote(), timeout=_ABORT_TIMEOUT_S)
        except ray.exceptions.RayActorError:
            pass  # it exits by itself when it is done
        except ray.exceptions.GetTimeoutError:
            ray.kill(controller)


def rank_errors(error: Exception) -> dict[int, Exception]:
    """The ranks' own errors in what :meth:`ElasticTrainer.fit` raised; empty if there are none."""
    if not isinstance(error, WorkerGroupError):
        return {}
    lost = WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError
    return {
        rank: ProcessLost(_cause_of_death(each)) if isinstance(each, lost) else each
        for rank, each in error.worker_failures.items()
    }


def _cause_of_death(error: Exception) -> str:
    """The line that says why, of Ray's long report on a worker that does not answer."""
    lines = [
        line.strip() for line in str(getattr(error, "health_check_failure", error)).split("\n")
    ]
    told = [line for line in lines if "because" in line]
    return (told or lines)[0]
