"""The variables that Ray is set by are still read, by the process that each is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from ebbtide.platform.ray_seam import environment
from tests.platform.ray_seam.pins import Pins

PINS = Pins("environment")
ROOT = Path(__file__).parents[3]
CORE = Path(ray.__file__).parent / "core" / "src" / "ray"
COMPILED = {
    **environment.FAST_FAILURE_DETECTION,
    **environment.RAYS_FAILURE_DETECTION,
    **environment.PATIENT_FAILURE_DETECTION,
    **environment.QUIET_NODE,
    **environment.QUICK_METRICS,
    **environment.NO_LOG_OF_CALLS,
}


@pytest.mark.parametrize("program", ["gcs/gcs_server", "raylet/raylet"])
def test_the_compiled_processes_read(program: str) -> None:
    binary = (CORE / program).read_bytes()
    known = {name for name in COMPILED if b"\0" + name.encode() + b"\0" in binary}
    PINS.knows(known, COMPILED, program)


def test_failure_detection_is_set_as_a_whole() -> None:
    assert environment.FAST_FAILURE_DETECTION.keys() == environment.RAYS_FAILURE_DETECTION.keys()
    assert environment.PATIENT_FAILURE_DETECTION.keys() <= environment.FAST_FAILURE_DETECTION.keys()


def test_the_cluster_file_detects_failures_as_fast_as_a_local_cluster() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    for name, value in environment.FAST_FAILURE_DETECTION.items():
        assert text.count(f"{name}={value}") == 2, name  # the head, the workers
    assert text.count("RAY_health_check") == 2 * len(environment.FAST_FAILURE_DETECTION)


def test_the_trainers_variables_reach_controller_and_workers() -> None:
    known = PINS.find("ray.train.v2._internal.constants:ENV_VARS_TO_PROPAGATE")
    PINS.knows(known, environment.CONTROLLER, "ENV_VARS_TO_PROPAGATE")


def test_the_time_out_for_a_group_is_that_for_placing_it() -> None:
    PINS.says(
        "ray.train.v2._internal.execution.worker_group.worker_group",
        "WORKER_GROUP_START_TIMEOUT_S_ENV_VAR",
        "WorkerGroupStartupTimeoutError",
    )


def test_serves_processes_read_its_variables() -> None:
    PINS.says("ray.serve._private.constants", *environment.QUIET_SERVE)
    PINS.says("ray.serve._private.replica", "_enabled = RAY_SERVE_METRICS_EXPORT_INTERVAL_MS != 0")
    PINS.says("ray.serve._private.controller", "asyncio.sleep(CONTROL_LOOP_INTERVAL_S)")


def test_a_sweeps_variables_are_read() -> None:
    known = set(PINS.find("ray.tune.constants:TUNE_ENV_VARS"))
    known |= set(PINS.find("ray.air.constants:AIR_ENV_VARS"))
    PINS.knows(known, environment.SWEEP, "Ray Tune")


def test_a_nodes_id_can_be_given() -> None:
    (name,) = environment.node_id("ab" * 28)
    PINS.says("ray._private.node", name)


def test_the_actor_of_a_replica_is_where_it_is_imported_from() -> None:
    PINS.says(environment.SERVE_REPLICA_MODULE, "class ReplicaActor")
