"""What one engine is started with: settings of Ray Serve LLM and vLLM out of a ServeConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.platform.ray_seam.environment import SERVE_REPLICA_MODULE
from ebbtide.platform.ray_seam.fork_client import IDLE_S as FORK_IDLE_S
from ebbtide.serve.config import Role, RoleConfig, ServeConfig

MODEL_CALLBACK = "ebbtide.serve.replica.LocalModel"
WORKER_EXTENSION = "ebbtide.serve.vllm_worker.WorkerExtension"
IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Has the model computed in the engine's own process. vLLM takes another process for that on CPUs,
and both wait for each other by polling without a pause: two cores for one engine, and nothing left
for the processes that bring its tokens to clients. Its reason, to bind threads to cores before
OpenMP starts, is none here: threads are not bound, and their number is in the environment."""

_GIB = 2**30
_CPU_KV_CACHE_GB = 1.0
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", None: "auto"}
_HEALTH_CHECK_S = 2
_GRACE_S = 20
ENGINE_STOP_S = 1.0
"""What an engine has to end by itself: its requests have ended before, and left to itself it would
take several seconds, one engine after the other."""
FORK_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.entrypoints.openai.api_server",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "ray.serve.llm.deployment",
    SERVE_REPLICA_MODULE,
    "ebbtide.serve.replica",
)
"""What the processes of every engine import; a node does it once."""
_STAY_WARM_S = "3600"
"""How long a node keeps that ready without an engine, where an endpoint may scale to zero."""
_START_ATTEMPTS = 1
"""A model that failed to load fails again; minutes of retries would only hide why."""


@dataclass(frozen=True)
class Site:
    """What the engines of an endpoint share beside their configuration.

    The replica of rank k of a role has its NIXL side channel at the role's port + k (times its
    GPUs).
    ``is_loopback``: every worker is on this machine, so none has to listen to the network.
    ``routers`` are the actors that workers report to, and ``token`` what these show them.
    ``generation`` counts the models that the endpoint has had.
    """

    side_channel_ports: Mapping[Role, int]
    is_loopback: bool
    routers: tuple[str, ...]
    token: str
    generation: int = 1


def application_names(config: ServeConfig, generation: int = 1) -> dict[Role, str]:
    """The names of the Ray Serve applications that hold the workers of each role."""
    suffix = "" if generation == 1 else f".{generation}"
    return {role: f"{config.name}.{role}{suffix}" for role in config.roles}


def llm_config(
    config: ServeConfig, role: Role, site: Site, num_replicas: int = 1
) -> dict[str, Any]:
    """The fields of ``ray.serve.llm.LLMConfig`` for so many replicas of a role, but for their
    runtime environment."""
    own = config.roles[role]
    fields: dict[str, Any] = {
        "model_loading_config": {"model_id": config.model_name, "model_source": config.model.uri},
        "callback_config": {
            "callback_class": MODEL_CALLBACK,
            "callback_kwargs": {
                "uri": config.model.uri,
                "quantization": config.quantization,
                "draft": config.speculation and config.speculation.draft,
            },
        },
        "accelerator_config": {"kind": config.accelerator},
        "log_engine_metrics": False,  # vLLM's own, at its /metrics: Ray's cost every step more
        "deployment_config": {
            "num_replicas": num_replicas,
            "max_constructor_retry_count": _START_ATTEMPTS,
            "health_check_period_s": _HEALTH_CHECK_S,
            "graceful_shutdown_timeout_s": _GRACE_S,
            "graceful_shutdown_wait_loop_s": 0.5,
            "ray_actor_options": {"num_cpus": own.cpus if config.accelerator == "gpu" else 0},
        },
        "experimental_configs": {
            "NIXL_SIDE_CHANNEL_PORT_BASE": site.side_channel_ports[role],
        },
        "engine_kwargs": engine_options(config, role),
    }
    if config.accelerator == "cpu":
        fields["placement_group_config"] = {"bundles": [{"CPU": own.cpus}]}
    return fields


def engine_options(config: ServeConfig, role: Role) -> dict[str, Any]:
    """vLLM's engine arguments; the user's own come last, and cannot be reserved ones."""
    own = config.roles[role]
    on_cpu = config.accelerator == "cpu"
    options: dict[str, Any] = {
        "dtype": "bfloat16" if config.quantization else _DTYPES[config.dtype],
        "tensor_parallel_size": max(1, own.gpus),
        "enforce_eager": on_cpu,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if on_cpu:
        options["distributed_executor_backend"] = IN_ENGINE
    if config.mode != "colocated":
        options["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",  # any worker can do all of a request when others are lost
            "kv_buffer_device": "cpu" if on_cpu else "cuda",
            "kv_load_failure_policy": "recompute",
        }
    if config.model.max_model_len is not None:
        options["max_model_len"] = config.model.max_model_len
    if config.speculation is not None:
        options["speculative_config"] = config.speculation.engine_options()
    kv_cache_gb = own.kv_cache_gb or (_CPU_KV_CACHE_GB if on_cpu else None)
    if kv_cache_gb is not None:
        options["kv_cache_memory_bytes"] = int(kv_cache_gb * _GIB)
    return {**options, **config.engine}


def environment(config: ServeConfig, role: Role, site: Site) -> dict[str, str]:
    """Environment variables of an engine's processes."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM sets it too late: NIXL is imported before it
        "OMP_NUM_THREADS": str(config.roles[role].threads),
    }
    if config.accelerator == "cpu":
        # else engines that share a machine bind their threads to the same cores
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if site.is_loopback:
        variables |= {"UCX_NET_DEVICES": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    if any(own.least == 0 for own in config.roles.values()):
        variables[FORK_IDLE_S] = _STAY_WARM_S
    return variables


def num_ports(config: ServeConfig) -> int:
    """How many side channels the workers of a generation can have at once: one for each replica's
    GPU, and as many for replicas that end while others take their place, and keep their rank."""
    return sum(_num_ports(own) for own in config.roles.values())


def _num_ports(own: RoleConfig) -> int:
    return 2 * own.most * max(1, own.gpus)


def side_channel_ports(config: ServeConfig, first: int) -> dict[Role, int]:
    """Each role's first port, in a run of :func:`num_ports` that begins at ``first``."""
    ports: dict[Role, int] = {}
    for role, own in config.roles.items():
        ports[role], first = first, first + _num_ports(own)
    return ports


def demand(config: ServeConfig, counts: Mapping[Role, int]) -> list[dict[str, float]]:
    """What so many replicas of each role reserve, a bundle per replica and GPU; the rest of Serve
    takes nothing."""
    bundles: list[dict[str, float]] = []
    for role, number in counts.items():
        own = config.roles[role]
        for _ in range(number):
            if config.accelerator == "cpu":
                bundles.append({"CPU": own.cpus})
            else:
                bundles.append({"CPU": own.cpus, "GPU": 1.0})
                bundles.extend({"GPU": 1.0} for _ in range(own.gpus - 1))
    return bundles
