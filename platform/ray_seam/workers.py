"""Worker processes: started ahead of time, prepared, and told apart from outside.

Promises: preparing a worker is never needed, it only makes the start of an actor faster.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]  # no stubs
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import (
    AGENT_PROCESS_TYPE_DASHBOARD_AGENT,
    AGENT_PROCESS_TYPE_RUNTIME_ENV_AGENT,
    WORKER_PROCESS_SETUP_HOOK_ENV_VAR,
    WORKER_PROCESS_TYPE_IDLE_WORKER,
    WORKER_PROCESS_TYPE_RESTORE_WORKER,
    WORKER_PROCESS_TYPE_RESTORE_WORKER_DELETE,
    WORKER_PROCESS_TYPE_SPILL_WORKER,
    WORKER_PROCESS_TYPE_SPILL_WORKER_DELETE,
)
from ray.core.generated.common_pb2 import Language
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.experimental import internal_kv

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.ray_seam import fork_client

RANK_MODULE = "ray.train.v2._internal.execution.worker_group.worker"
"""Where Ray Train has the actor class of its ranks; importing it takes a worker seconds."""

HOOK_VARIABLE = WORKER_PROCESS_SETUP_HOOK_ENV_VAR
"""Environment variable: the ``module.function`` that a worker process calls before its first task.

Ray has that as ``worker_process_setup_hook``, for whole jobs only.
"""

_OTHER_PYTHON = {"pip", "uv", "conda", "container", "image_uri", "py_executable"}
"""Keys of a runtime environment with which workers have a Python of their own."""

_RAYLETS_PYTHON = (
    r"tr '\0' '\n' < /proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'"
)
"""Shell: the Python with which the raylet, this process's parent, starts its workers."""

_PRESTART_TIMEOUT_S = 10.0
_PREPARED = "ebbtide-prepared"
_KEEP_PRESTARTED_S = 7 * 24 * 3600
_NOT_BUSY = (
    WORKER_PROCESS_TYPE_IDLE_WORKER,
    AGENT_PROCESS_TYPE_DASHBOARD_AGENT,
    AGENT_PROCESS_TYPE_RUNTIME_ENV_AGENT,
    WORKER_PROCESS_TYPE_SPILL_WORKER,
    WORKER_PROCESS_TYPE_RESTORE_WORKER,
    WORKER_PROCESS_TYPE_SPILL_WORKER_DELETE,
    WORKER_PROCESS_TYPE_RESTORE_WORKER_DELETE,
)


def is_busy_worker(title: str) -> bool:
    """Whether a process with this title (its command line) holds an actor or runs a task."""
    return title.startswith("ray::") and not title.startswith(_NOT_BUSY)


def forked_environment(variables: Mapping[str, str], modules: Sequence[str]) -> dict[str, Any]:
    """The runtime environment of workers with these environment ``variables``, which are forked
    from a process of their node that has imported ``modules``.

    They are started as Ray does it where the job has another Python (``pip``, ``conda``,
    containers), and on nodes that lack this one.
    """
    python, client = sys.executable, str(fork_client.__file__)
    odd = [path for path in (python, client) if shlex.quote(path) != path]
    given = ray.get_runtime_context().runtime_env.keys() if ray.is_initialized() else set()
    if sys.platform != "linux" or odd or _OTHER_PYTHON & given:
        return {"env_vars": dict(variables)}
    return {
        "env_vars": {**variables, fork_client.MODULES: ",".join(modules)},
        "py_executable": f"$(if [ -x {python} ] && [ -f {client} ]; "
        f"then echo {python} -I -S {client}; else {_RAYLETS_PYTHON}; fi)",
    }


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


def announce_prepared() -> None:
    """Tell the job that this worker process has done what was to be done before its first task."""
    node_id = ray.get_runtime_context().get_node_id()
    internal_kv._internal_kv_put(f"{_prepared()}{node_id}/{os.getpid()}", b"", namespace=_PREPARED)


def prepared_workers() -> Counter[str]:
    """How many processes of this job have been prepared on each node, by its id; also used ones."""
    keys = internal_kv._internal_kv_list(_prepared(), namespace=_PREPARED)
    return Counter(key.decode().split("/")[1] for key in keys)


def forget_prepared() -> None:
    """The job is at its end, and with it its processes."""
    internal_kv._internal_kv_del(_prepared(), del_by_prefix=True, namespace=_PREPARED)


def _prepared() -> str:
    return f"{ray.get_runtime_context().get_job_id()}/"
