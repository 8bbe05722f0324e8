"""The private interfaces of Ray that tuning leans on are as they were. Starts nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from ebbtide.tune import ray_seam
from ebbtide.tune.evaluator import LeaseLost, TrialFailed


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_ray_is_the_version_that_this_was_made_for() -> None:
    import ray

    assert ray.__version__.startswith("2.60."), (
        f"Ray is {ray.__version__}: run the tests of tests/tune, mend tune/ray_seam.py, then this"
    )


def test_the_loop_of_ray_tune_makes_its_controller_by_the_name_that_is_replaced() -> None:
    import ray.tune.tune
    from ray.tune.execution.tune_controller import TuneController

    assert ray.tune.tune.TuneController is TuneController
    assert "TuneController(**runner_kwargs)" in inspect.getsource(ray.tune.tune.run)
    assert {"reuse_actors", "resume_config"} <= parameters(TuneController.__init__)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("_process_trial_failure", {"trial", "exception"}),
        ("_actor_started", {"tracked_actor"}),
        ("_remove_actor", {"tracked_actor"}),
        ("cleanup", set()),
    ],
)
def test_the_controller_has(method: str, wanted: set[str]) -> None:
    from ray.tune.execution.tune_controller import TuneController

    assert wanted <= parameters(getattr(TuneController, method))


def test_the_controller_keeps_its_actor_manager_where_it_is_replaced() -> None:
    from ray.tune.execution.tune_controller import TuneController

    source = inspect.getsource(TuneController.__init__)
    assert "self._actor_manager = RayActorManager(resource_manager=resource_manager)" in source


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("next", {"timeout"}),
        ("cleanup", set()),
        ("_try_kill_actor", set()),
        ("_actor_stop_resolved", {"tracked_actor"}),
        ("_actor_start_failed", {"tracked_actor", "exception"}),
        ("_actor_task_failed", {"tracked_actor_task", "exception"}),
        ("_cleanup_actor_futures", {"tracked_actor"}),
    ],
)
def test_the_actor_manager_has(method: str, wanted: set[str]) -> None:
    from ray.air.execution._internal.actor_manager import RayActorManager

    assert wanted <= parameters(getattr(RayActorManager, method))


def test_the_actor_manager_keeps_what_is_read() -> None:
    from ray.air.execution._internal.actor_manager import RayActorManager

    source = inspect.getsource(RayActorManager)
    for name in ("_live_actors_to_kill", "_live_actors_to_ray_actors_resources"):
        assert f"self.{name}" in source
    assert "actor.__ray_ready__.remote()" in source
    assert "getattr(ray_actor, method_name)" in source


def test_what_a_trial_is_given() -> None:
    from ray.tune.experiment.trial import Trial, _get_trainable_kwargs

    source = inspect.getsource(_get_trainable_kwargs)
    assert '"config"' in source and "TRIAL_INFO" in source
    assert "get_auto_filled_metrics" in inspect.getsource(Trial.set_ray_actor)
    assert "self.run_metadata.num_failures <= self.max_failures" in inspect.getsource(
        Trial.should_recover
    )


def test_the_settings_are_still_read() -> None:
    from ray.air.constants import AIR_ENV_VARS
    from ray.tune.constants import TUNE_ENV_VARS

    known = set(TUNE_ENV_VARS) | set(AIR_ENV_VARS)
    assert set(ray_seam.SETTINGS) <= known, set(ray_seam.SETTINGS) - known


def test_every_kind_of_failure_becomes_one() -> None:
    def told(cause: Exception) -> TrialFailed:
        return ray_seam.failure_of(RayTaskError("f", "trace", cause).as_instanceof_cause())

    assert str(told(TrialFailed("wrong"))) == "wrong" and not told(TrialFailed("wrong")).may_retry
    assert told(TrialFailed("killed", may_retry=True)).may_retry
    assert told(LeaseLost("gone")).may_retry
    assert str(told(ValueError("odd"))) == "ValueError: odd"
    died = ray_seam.failure_of(ActorDiedError())
    assert died.may_retry and not died.evicted
