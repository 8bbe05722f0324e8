"""What Ray Serve LLM has no public name for: callbacks, engine, vLLM's app. Imports vLLM."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase

__all__ = ["CallbackBase", "engine_app", "engine_client"]


def engine_client(server: Any) -> Any:
    """vLLM's client of the engine process behind an LLMServer; None before it has started."""
    return server.engine and server.engine._engine_client


async def engine_app(server: Any) -> Any:
    """vLLM's own ASGI application over a started LLMServer's engine, as for direct streaming."""
    return await server.engine.build_asgi_app()
