"""The two decisions of Ray Train's controller, handed to objects of ours.

How many workers there are, and where, is decided by a
:class:`~ebbtide.platform.ray_seam.decisions.Scaling`, whether a run goes on after a failure by a
``Judge``. Promises: neither hears of Ray's own types.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.train import (
    ControllerError,
    FailureConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ScalingDecision,
)

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.ray_seam.coordinator import teach_labels
from ebbtide.platform.ray_seam.decisions import Judge, NodeOffer, ProcessLost, Scaling
from ebbtide.platform.ray_seam.state import draining_nodes, unreachable_nodes
from ebbtide.platform.ray_seam.train_group import selector_of
from ebbtide.platform.ray_seam.workers import prepared_workers

logger = logging.getLogger(__name__)

_COORDINATOR_TIMEOUT_S = 5.0
_TEACH_INTERVAL_S = 20.0
"""A coordinator that was restarted is told again, as often as requests are repeated."""


class ElasticPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # untyped base
    """Ray's elastic policy with the counting and the decision given to :class:`Scaling`.

    Resources are still reserved with the cluster's coordinator, so that several runs share a
    cluster; but its view is brought up to date before it is asked (it refreshes every 20 s only).
    """

    def __init__(self, scaling_config: ScalingConfig, scaling: Scaling) -> None:
        super().__init__(scaling_config)
        self.scaling = scaling
        self._requested: Sequence[Mapping[str, str]] = scaling.to_request([])
        self._labels: dict[str, Mapping[str, str]] = {}
        self._taught_s = float("-inf")

    def _get_num_workers_for_resource_request(self) -> int:
        return len(self._requested)

    def _maybe_send_resource_request(self) -> None:
        self._coordinator_client.maybe_send_resource_request(
            LabelledRequest(self.scaling_config, self._requested), len(self._requested)
        )

    def _send_resource_request(self) -> None:
        self._teach()
        self._coordinator_client.send_resource_request(
            LabelledRequest(self.scaling_config, self._requested), len(self._requested)
        )

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        return self._decision(self.scaling.to_start(self._offers(probe=True)))

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        return self._decision(self.scaling.to_resize(self._offers(probe=False)))

    def _decision(self, workers: int | None) -> ScalingDecision:
        return NoopDecision() if workers is None else self._get_resize_decision(workers)

    def _offers(self, probe: bool) -> list[NodeOffer]:
        reserved = self._reserved()
        draining = draining_nodes()
        unreachable = unreachable_nodes(list(reserved)) if probe else set()
        prepared = prepared_workers()
        offers = [
            NodeOffer(
                node_id,
                self._count_possible_workers({node_id: resources}),
                node_id in draining,
                node_id not in unreachable,
                draining.get(node_id),
                warm=node_id in prepared,
                labels=self._labels_of(node_id),
            )
            for node_id, resources in reserved.items()
        ]
        # ranks may be on other nodes than the reserved ones: whichever goes is told of
        offers += [
            NodeOffer(node_id, workers=0, draining=True, deadline_s=deadline_s)
            for node_id, deadline_s in draining.items()
            if node_id not in reserved
        ]
        if any(self._requested):  # where the run is matters, too
            known = {offer.node_id for offer in offers}
            offers += [
                NodeOffer(node["NodeID"], workers=0, labels=node.get("Labels") or {})
                for node in ray.nodes()
                if node["Alive"] and node["NodeID"] not in known
            ]
        wanted = [dict(labels) for labels in self.scaling.to_request(offers)]
        if wanted != self._requested:
            self._requested = wanted
            self._send_resource_request()
        return offers

    def _labels_of(self, node_id: str) -> Mapping[str, str]:
        if node_id not in self._labels:
            self._labels = {node["NodeID"]: node.get("Labels") or {} for node in ray.nodes()}
        return self._labels.get(node_id, {})

    def _teach(self) -> None:
        if not any(self._requested) or time.monotonic() - self._taught_s < _TEACH_INTERVAL_S:
            return
        self._taught_s = time.monotonic()
        try:
            teach_labels(self._autoscaling_coordinator)
        except ClusterError as error:
            logger.warning("%s", error)

    def _reserved(self) -> dict[str, dict[str, float]]:
        self._teach()
        try:
            answer = self._autoscaling_coordinator.get_reserved_resources.remote(
                self._requester_id, recompute=True
            )
            return dict(ray.get(answer, timeout=_COORDINATOR_TIMEOUT_S))
        except ray.exceptions.RayError as error:
            logger.warning("the cluster's resources cannot be asked for: %s", error)
            return {}


class LabelledRequest:
    """What the client of the coordinator reads of a scaling configuration, with a choice of labels
    for each worker."""

    def __init__(self, config: ScalingConfig, labels: Sequence[Mapping[str, str]]) -> None:
        self._labels = labels
        self._resources_per_worker_not_none = config._resources_per_worker_not_none
        self._trainer_resources_not_none = config._trainer_resources_not_none

    def _label_selector_per_worker(self, num_workers: int) -> list[dict[str, str]] | None:
        chosen = [dict(labels) for labels in self._labels[:num_workers]]
        return chosen if any(chosen) else None


class PlaceRanks(ControllerCallback):  # type: ignore[misc]  # untyped base
    """Has a group started on the nodes that :class:`Scaling` names."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling

    def on_controller_start_worker_group(
        self, *, scaling_config: ScalingConfig, num_workers: int
    ) -> dict[str, str] | None:
        nodes = self._scaling.to_place(num_workers)
        return selector_of(nodes) if nodes else None


class JudgingPolicy(FailurePolicy):  # type: ignore[misc]  # untyped base
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


def rank_errors(error: Exception) -> dict[int, Exception]:
    """The ranks' own errors in what a trainer's ``fit`` raised; empty if there are none."""
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
