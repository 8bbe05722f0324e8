"""Workers can be started ahead, prepared and told apart as Ray has it now."""

from __future__ import annotations

from tests.platform.ray_seam.pins import Pins

PINS = Pins("workers")
GENERATED = "ray.core.generated"


def test_a_node_can_be_asked_for_workers() -> None:
    request = PINS.find(f"{GENERATED}.node_manager_pb2:PrestartWorkersRequest")
    PINS.knows(
        {field.name for field in request.DESCRIPTOR.fields},
        ["language", "job_id", "runtime_env_info", "keep_alive_duration_secs", "num_workers"],
        "PrestartWorkersRequest",
    )
    information = request().runtime_env_info
    information.serialized_runtime_env = "{}"
    PINS.find(f"{GENERATED}.common_pb2:Language.PYTHON")


def test_a_worker_calls_its_hook_before_its_first_task() -> None:
    name = PINS.own("HOOK_VARIABLE")
    constants = PINS.find("ray._private.ray_constants")
    assert name == constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    PINS.says("ray._private.workers.default_worker", "WORKER_PROCESS_SETUP_HOOK_ENV_VAR")


def test_a_worker_can_have_an_executable_of_its_own() -> None:
    PINS.takes("ray.runtime_env:RuntimeEnv", "py_executable", "env_vars")
    PINS.says("ray._private.runtime_env.context", '["exec", self.py_executable]')
    PINS.says("ray._private.runtime_env.context", '"bash", "-c"')
    PINS.says("ray._private.workers.default_worker", '__name__ == "__main__"')


def test_the_actor_of_a_rank_is_where_workers_import_it_from() -> None:
    PINS.find(f"{PINS.own('RANK_MODULE')}:RayTrainWorker")


def test_busy_workers_are_told_from_idle_ones_and_from_rays_own_processes() -> None:
    is_busy_worker = PINS.own("is_busy_worker")
    assert is_busy_worker("ray::RayTrainWorker.execute")
    for title in ("ray::IDLE", "ray::IDLE_SpillWorker", "ray::SPILL_SpillWorker", "raylet"):
        assert not is_busy_worker(title), title
    for title in ("ray::DELETE_RestoreWorker", "ray::DashboardAgent", "ray::RuntimeEnvAgent"):
        assert not is_busy_worker(title), title


def test_a_worker_can_say_that_it_is_prepared() -> None:
    store = "ray.experimental.internal_kv"
    PINS.takes(f"{store}:_internal_kv_put", "key", "value", "namespace")
    PINS.takes(f"{store}:_internal_kv_list", "prefix", "namespace")
    PINS.takes(f"{store}:_internal_kv_del", "key", "del_by_prefix", "namespace")


def test_what_is_patched_while_a_fork_server_imports_is_there() -> None:
    PINS.find("ray.actor:ActorClassID.from_random")
    PINS.says("ray.actor:_make_actor", "ActorClassID.from_random()")
    PINS.find("ray:UniqueID.from_random")
