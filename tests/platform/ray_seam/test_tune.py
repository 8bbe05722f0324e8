"""Ray Tune's loop, controller and actor manager are as the pooled ones expect. Starts nothing.

What they do together is seen on real clusters in ``tests/tune/test_job*.py``.
"""

from __future__ import annotations

import pytest

from tests.platform.ray_seam.pins import Pins

PINS = Pins("tune")
LOOP = "ray.tune.tune"
CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
MANAGER = "ray.air.execution._internal.actor_manager:RayActorManager"
RESOURCES = "ray.air.execution.resources"


def test_the_loop_makes_its_controller_by_the_name_that_is_replaced() -> None:
    assert PINS.find(f"{LOOP}:TuneController") is PINS.find(CONTROLLER)
    PINS.says(f"{LOOP}:run", "TuneController(**runner_kwargs)")
    PINS.takes(f"{CONTROLLER}.__init__", "reuse_actors", "resume_config")


def test_the_loop_gives_its_account_by_the_name_that_is_replaced() -> None:
    account = "ray.tune.analysis.experiment_analysis:ExperimentAnalysis"
    assert PINS.find(f"{LOOP}:ExperimentAnalysis") is PINS.find(account)
    PINS.says(f"{LOOP}:run", "return ExperimentAnalysis(")
    grid = "for trial in self._experiment_analysis.trials"
    PINS.says("ray.tune.result_grid:ResultGrid.__init__", grid)


@pytest.mark.parametrize(
    ("method", "takes"),
    [
        ("_process_trial_failure", ["self", "trial", "exception"]),
        ("_schedule_trial_stop", ["self", "trial", "exception"]),
        ("_schedule_trial_pause", ["self", "trial", "should_checkpoint"]),
        ("_execute_action", ["self", "trial", "decision", "after_save"]),
        ("checkpoint", ["self", "force", "wait"]),
        ("_actor_started", ["self", "tracked_actor"]),
        ("_remove_actor", ["self", "tracked_actor"]),
        ("cleanup", ["self"]),
    ],
)
def test_the_controller_has(method: str, takes: list[str]) -> None:
    PINS.takes(f"{CONTROLLER}.{method}", *takes)


def test_the_controller_keeps_its_actor_manager_where_it_is_replaced() -> None:
    made = "self._actor_manager = RayActorManager(resource_manager=resource_manager)"
    PINS.says(f"{CONTROLLER}.__init__", made)


@pytest.mark.parametrize(
    ("method", "takes"),
    [
        ("__init__", ["self", "resource_manager"]),
        ("next", ["self", "timeout"]),
        ("cleanup", ["self"]),
        ("_try_kill_actor", ["self"]),
        ("_actor_stop_resolved", ["self", "tracked_actor"]),
        ("_actor_start_failed", ["self", "tracked_actor", "exception"]),
        ("_actor_task_failed", ["self", "tracked_actor_task", "exception"]),
        ("_cleanup_actor_futures", ["self", "tracked_actor"]),
    ],
)
def test_the_actor_manager_has(method: str, takes: list[str]) -> None:
    PINS.takes(f"{MANAGER}.{method}", *takes, others=False)


def test_the_actor_manager_keeps_what_is_read() -> None:
    PINS.says(
        MANAGER,
        "self._live_actors_to_kill",
        "self._live_actors_to_ray_actors_resources",
        "self._resource_manager",
        "actor.__ray_ready__.remote()",
        "getattr(ray_actor, method_name)",
        "self.__init__(resource_manager=self._resource_manager)",
    )
    task = "ray.air.execution._internal.tracked_actor_task:TrackedActorTask"
    PINS.says(f"{task}.__init__", "self._tracked_actor =")


@pytest.mark.parametrize(
    ("method", "takes"),
    [
        ("request_resources", ["self", "resource_request"]),
        ("cancel_resource_request", ["self", "resource_request"]),
        ("has_resources_ready", ["self", "resource_request"]),
        ("acquire_resources", ["self", "resource_request"]),
        ("free_resources", ["self", "acquired_resource"]),
        ("get_resource_futures", ["self"]),
        ("update_state", ["self"]),
        ("clear", ["self"]),
    ],
)
def test_the_resource_manager_has(method: str, takes: list[str]) -> None:
    PINS.takes(f"{RESOURCES}.resource_manager:ResourceManager.{method}", *takes, others=False)


def test_an_actors_class_is_made_of_the_resources_that_it_acquired() -> None:
    acquired = f"{RESOURCES}.request:AcquiredResources"
    parameters = ["self", "entity", "bundle", "bundle_index"]
    PINS.takes(f"{acquired}._annotate_remote_entity", *parameters, others=False)
    PINS.says(f"{acquired}.annotate_remote_entities", "self._annotate_remote_entity(")


def test_what_a_trial_is_given() -> None:
    trial = "ray.tune.experiment.trial"
    PINS.says(f"{trial}:_get_trainable_kwargs", '"config"', "TRIAL_INFO")
    PINS.says(f"{trial}:Trial.set_ray_actor", "get_auto_filled_metrics")
    PINS.says(
        f"{trial}:Trial.should_recover", "self.run_metadata.num_failures <= self.max_failures"
    )


def test_the_register_is_found_by_its_name_and_asked_for_every_trial() -> None:
    register = "ray.tune.registry"
    PINS.says(f"{register}:_has_trainable", "_global_registry.contains(TRAINABLE_CLASS")
    PINS.says(f"{register}:get_trainable_cls", "_global_registry.get(TRAINABLE_CLASS")
    PINS.says(f"{register}:register_trainable", "_global_registry.register(TRAINABLE_CLASS")
    for method, takes in (("contains", ()), ("get", ()), ("register", ("value",))):
        PINS.takes(f"{register}:_Registry.{method}", "self", "category", "key", *takes)
    PINS.says("ray.tune.experiment.trial:Trial.get_trainable_cls", "get_trainable_cls(")


def test_events_are_picked_one_by_one_while_a_record_is_told() -> None:
    events = "ray.air.execution._internal.event_manager:RayEventManager"
    PINS.takes(f"{events}.get_futures", "self", others=False)
    PINS.takes(f"{events}.resolve_future", "self", "future", others=False)
    PINS.says(MANAGER, "self._actor_state_events", "self._actor_task_events")
    PINS.takes("ray.exceptions:RayTaskError.__init__", "function_name", "traceback_str", "cause")


def test_a_pause_saves_first_and_no_checkpoint_means_no_restore() -> None:
    result = "ray.train._internal.session:_TrainingResult"
    PINS.takes(f"{result}.__init__", "self", "checkpoint", "metrics", others=False)
    PINS.says(f"{CONTROLLER}._schedule_trial_save", 'method_name="save"')
    PINS.says(f"{CONTROLLER}._schedule_trial_stop", "if trial not in self._trial_to_actor:")
    PINS.says(f"{CONTROLLER}._process_trial_save", "if not checkpoint_value.checkpoint:")
    PINS.says(f"{CONTROLLER}._schedule_trial_restore", "if not checkpoint_result:")


def test_a_population_saves_and_pauses_by_itself_and_is_restored_by_name() -> None:
    population = "ray.tune.schedulers.pbt:PopulationBasedTraining"
    PINS.says(f"{population}._checkpoint_or_exploit", "tune_controller._schedule_trial_save(")
    PINS.says(
        f"{population}._exploit",
        "tune_controller.pause_trial(trial, should_checkpoint=False)",
        "trial.run_metadata.checkpoint_manager._latest_checkpoint_result",
    )
    PINS.says(f"{CONTROLLER}._execute_action", "self.pause_trial(")
    PINS.says(f"{CONTROLLER}._schedule_trial_restore", 'method_name = "restore"')
    PINS.says(f"{CONTROLLER}._process_trial_result", "self._scheduler_alg.on_trial_result(")
    PINS.says(f"{LOOP}:run", "runner.checkpoint(force=True, wait=True)")


@pytest.mark.parametrize("module", [LOOP, "ray.tune.analysis.experiment_analysis"])
def test_the_failures_are_repeated_by_the_loggers_that_are_silenced(module: str) -> None:
    PINS.says(module, "logger = logging.getLogger(__name__)")
