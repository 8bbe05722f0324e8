"""What Ray Serve LLM has no public name for: callbacks, engine, vLLM's app. Imports vLLM."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import (
    BUILTIN_BACKENDS,
    KVConnectorBackendFactory,
)
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm.deployment import LLMServer

__all__ = [
    "CallbackBase",
    "Engine",
    "Server",
    "engine_app",
    "engine_client",
    "register_connectors",
]


def register_connectors() -> None:
    """Have the cluster that this process is connected to know Ray's connectors for keys and values.

    To be called before replicas start: one that finds them missing registers them itself, and fails
    if another does so in the same moment. Importing Ray Serve LLM registers them, but only in the
    first cluster that a process is connected to.
    """
    for name, path in BUILTIN_BACKENDS.items():
        KVConnectorBackendFactory.unregister_backend(name)
        KVConnectorBackendFactory.register_backend(name, path)


class Server(LLMServer):  # type: ignore[misc]  # Ray ships no types
    """Ray's, without its report of usage: that is made by an actor which imports vLLM again."""

    async def _start_engine(self) -> None:
        await self.engine.start()


class Engine(VLLMEngine):  # type: ignore[misc]  # Ray ships no types
    """Ray's, with the executor that ``engine_kwargs`` name: Ray has engines on CPUs take another,
    whatever they say."""

    def _start_async_llm_engine(self, arguments: Any, config: Any, placement_group: Any) -> Any:
        if wanted := self.llm_config.engine_kwargs.get("distributed_executor_backend"):
            config.parallel_config.distributed_executor_backend = wanted
        return super()._start_async_llm_engine(arguments, config, placement_group)


def engine_client(server: Any) -> Any:
    """vLLM's client of the engine process behind an LLMServer; None before it has started."""
    return server.engine and server.engine._engine_client


async def engine_app(server: Any) -> Any:
    """vLLM's own ASGI application over a started LLMServer's engine, as for direct streaming."""
    return await server.engine.build_asgi_app()
