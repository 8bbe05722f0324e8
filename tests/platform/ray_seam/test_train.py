"""Ray Train's trainer and controller can be changed where :class:`ElasticTrainer` changes them.

What they do together is seen on real clusters in ``tests/train/test_elastic.py``.
"""

from __future__ import annotations

import pytest

from tests.platform.ray_seam.pins import Pins

PINS = Pins("train")
INTERNAL = "ray.train.v2._internal"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer"
CONTROLLER = f"{INTERNAL}.execution.controller:TrainController"


def test_the_trainer_starts_its_controller_through_one_method_with_policies() -> None:
    PINS.says(
        f"{TRAINER}.fit",
        "result = self._initialize_and_run_controller(",
        "scaling_policy=create_scaling_policy(self.scaling_config)",
        "failure_policy=create_failure_policy(self.run_config.failure_config)",
        "callbacks=self._create_default_callbacks()",
    )
    PINS.takes(f"{CONTROLLER}.__init__", "scaling_policy", "failure_policy", "callbacks")
    assert issubclass(PINS.own("ElasticTrainer"), PINS.find(TRAINER))


@pytest.mark.parametrize(
    "method",
    [
        "run",
        "abort",
        "get_result",
        "get_state",
        "_step",
        "get_worker_group",
        "_shutdown_worker_group",
    ],
)
def test_the_controller_has(method: str) -> None:
    PINS.takes(f"{CONTROLLER}.{method}", "self", others=False)


def test_a_step_of_the_controller_says_what_state_comes_next() -> None:
    PINS.says(f"{CONTROLLER}._step", "next_state")
    PINS.find(f"{INTERNAL}.execution.controller.controller:TrainControllerLoopIterationResult")


def test_a_group_that_was_ended_while_it_waits_is_not_ended_again() -> None:
    PINS.says(f"{CONTROLLER}._shutdown_worker_group", "self._worker_group = None")
    PINS.says(f"{CONTROLLER}._execute_resize_decision", "if self._worker_group:")
    PINS.says(f"{CONTROLLER}._shutdown", "if self._worker_group")


def test_the_default_callbacks_can_be_chosen_from() -> None:
    PINS.says(
        f"{TRAINER}._create_default_callbacks",
        "WorkingDirectorySetupCallback",
        "DatasetsCallback",
        "PlacementGroupCleanerCallback",
        "StateManagerCallback",
    )
    PINS.takes(f"{INTERNAL}.callbacks.state_manager:StateManagerCallback.__init__", "datasets")


def test_the_process_group_is_taken_down_through_on_shutdown() -> None:
    callback = f"{INTERNAL}.callbacks.backend_setup:BackendSetupCallback"
    PINS.says(f"{callback}.before_execution_group_shutdown", "on_shutdown")
    backend = "ray.train.torch.config:_TorchBackend.on_shutdown"
    PINS.takes(backend, "self", "worker_group", "backend_config", others=False)
    config = PINS.own("_KilledTorchConfig")(timeout_s=7)
    assert config.backend_cls is PINS.own("_KillWorkers")


def test_variables_are_handed_on_as_a_mapping() -> None:
    assert isinstance(PINS.find(f"{INTERNAL}.constants:get_env_vars_to_propagate")(), dict)


def test_a_dashboard_is_known_of_and_a_warning_can_be_left_out() -> None:
    PINS.takes("ray._private.worker:get_dashboard_url", others=False)
    PINS.find("ray._common.constants:RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR")


def test_ranks_are_given_a_meeting_place_that_only_reports_need() -> None:
    group = f"{INTERNAL}.execution.worker_group.worker_group"
    PINS.says(f"{group}:WorkerGroup._start_impl", "sync_actor = SynchronizationActor.options(")
    PINS.find(f"{group}:SynchronizationActor")
    state = f"{INTERNAL}.execution.worker_group.state"
    PINS.says(f"{state}:_shutdown_sync_actor", "ray.kill(sync_actor)")
    PINS.says(f"{state}:WorkerGroupState.shutdown", "_shutdown_sync_actor(self.sync_actor)")
    PINS.says(f"{state}:WorkerGroupStateBuilder.shutdown", "_shutdown_sync_actor(self.sync_actor)")
