"""Ray Train's policies are asked and counted as the ones that stand in for them expect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from ray.exceptions import ActorDiedError
from ray.train import (
    ControllerError,
    FailureConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)

from ebbtide.platform.ray_seam.decisions import ProcessLost
from tests.platform.ray_seam.pins import Pins

PINS = Pins("train_policies")
INTERNAL = "ray.train.v2._internal"
POLICIES = f"{INTERNAL}.execution.scaling_policy"
ELASTIC = f"{POLICIES}:ElasticScalingPolicy"
DEATH = "The actor died unexpectedly.\n\tpid: 1\nThe actor died because its node has died. X"


def test_the_controller_asks_for_a_size_through_these_methods() -> None:
    base = f"{POLICIES}:ScalingPolicy.make_decision_for"
    PINS.takes(
        f"{base}_running_worker_group",
        "self",
        "worker_group_state",
        "worker_group_status",
        others=False,
    )
    PINS.takes(f"{base}_non_running_worker_group", "self", others=False)


@pytest.mark.parametrize(
    ("method", "takes"),
    [
        ("_maybe_send_resource_request", ["self"]),
        ("_send_resource_request", ["self"]),
        ("_get_num_workers_for_resource_request", ["self"]),
        ("_get_resize_decision", ["self", "num_workers"]),
    ],
)
def test_the_elastic_policy_has(method: str, takes: list[str]) -> None:
    PINS.takes(f"{ELASTIC}.{method}", *takes, others=False)


def test_the_elastic_policy_asks_for_as_much_as_it_is_told_to() -> None:
    PINS.says(f"{ELASTIC}._send_resource_request", "_get_num_workers_for_resource_request()")


def test_a_node_is_counted_as_ray_counts_it() -> None:
    config = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 2, "x": 1})
    policy = PINS.find(ELASTIC)(config)
    assert policy._count_possible_workers({"n": {"CPU": 5.0, "x": 9.0}}) == 2


def test_a_decision_to_do_nothing_is_made_of_nothing() -> None:
    decision = PINS.find(f"{POLICIES}:NoopDecision")()
    assert isinstance(decision, PINS.find(f"{POLICIES}:ScalingDecision"))


def test_the_coordinator_recomputes_when_asked() -> None:
    coordinator = (
        "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
        ":_AutoscalingCoordinatorActor"
    )
    method = f"{coordinator}.get_reserved_resources"
    PINS.takes(method, "self", "requester_id", "recompute", others=False)
    PINS.says(f"{INTERNAL}.execution.scaling_policy.scaling_policy", "_requester_id")
    PINS.says(f"{INTERNAL}.execution.scaling_policy.scaling_policy", "_autoscaling_coordinator")


def test_a_group_is_started_on_the_nodes_that_are_named() -> None:
    callback = f"{INTERNAL}.execution.callback:ControllerCallback"
    method = f"{callback}.on_controller_start_worker_group"
    PINS.takes(method, "self", "scaling_config", "num_workers", others=False)
    PINS.says(f"{INTERNAL}.execution.controller.controller", "on_controller_start_worker_group")
    PINS.says(
        f"{INTERNAL}.execution.worker_group.worker_group",
        "bundle_label_selector=worker_group_context.label_selector",
    )
    key = PINS.find("ray._raylet:RAY_NODE_ID_KEY")
    place = PINS.own("PlaceRanks")(_Placing())
    assert isinstance(place, PINS.find(callback))
    selected = [
        place.on_controller_start_worker_group(scaling_config=None, num_workers=workers)
        for workers in (2, 9)
    ]
    assert selected == [{key: "in(a,b)"}, None]


class _Placing:
    def to_place(self, workers: int) -> list[str]:
        return ["a", "b"] if workers == 2 else []


def test_the_controller_asks_after_a_failure_through_one_method() -> None:
    policy = f"{INTERNAL}.execution.failure_handling:FailurePolicy"
    PINS.takes(f"{policy}.make_decision", "self", "training_failed_error", others=False)
    PINS.takes(f"{policy}.__init__", "self", "failure_config", others=False)


class _Judge:
    def __init__(self, answer: bool) -> None:
        self.answer, self.heard = answer, list[Mapping[int, Exception]]()

    def go_on(self, errors: Mapping[int, Exception]) -> bool:
        self.heard.append(errors)
        return self.answer


def _lost() -> Exception:
    kind = PINS.find(f"{INTERNAL}.exceptions:WorkerHealthCheckFailedError")
    error: Exception = kind("A worker health check failed.", failure=Exception(DEATH))
    return error


def _decision(error: TrainingFailedError, judge: _Judge) -> str:
    return str(PINS.own("JudgingPolicy")(FailureConfig(), judge).make_decision(error).name)


@pytest.mark.parametrize(("answer", "decision"), [(True, "RETRY"), (False, "RAISE")])
def test_failures_of_ranks_are_judged(answer: bool, decision: str) -> None:
    judge = _Judge(answer)
    assert _decision(WorkerGroupError("", {0: _lost(), 1: ValueError("boom")}), judge) == decision
    assert [type(each) for each in judge.heard[0].values()] == [ProcessLost, ValueError]


def test_a_group_that_died_while_it_came_up_is_judged_as_a_lost_process() -> None:
    judge = _Judge(True)
    assert _decision(ControllerError(ActorDiedError()), judge) == "RETRY"
    assert isinstance(judge.heard[0][0], ProcessLost)


def test_a_group_that_finds_no_place_is_tried_again_without_a_judge() -> None:
    judge = _Judge(False)
    kind = PINS.find(f"{INTERNAL}.exceptions:WorkerGroupStartupTimeoutError")
    assert _decision(ControllerError(kind(2)), judge) == "RETRY"
    assert judge.heard == []


def test_a_fault_of_the_controller_itself_ends_the_run() -> None:
    judge = _Judge(True)
    assert _decision(ControllerError(KeyError("a bug")), judge) == "RAISE"
    assert judge.heard == []


def test_ranks_errors_are_told_from_lost_processes() -> None:
    rank_errors = PINS.own("rank_errors")
    errors = rank_errors(WorkerGroupError("", {0: _lost(), 1: ValueError("boom")}))
    assert isinstance(errors[0], ProcessLost)
    assert str(errors[0]) == "The actor died because its node has died. X"
    assert isinstance(errors[1], ValueError)
    assert rank_errors(RuntimeError("else")) == {}
