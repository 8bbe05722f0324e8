"""What Ray Serve LLM has no public name for: its requests, its errors, its engine. Imports vLLM."""

from __future__ import annotations

import json
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorInfo,
    ErrorResponse,
    OpenAIHTTPException,
    to_model_metadata,
)

__all__ = [
    "CallbackBase",
    "ChatCompletionRequest",
    "CompletionRequest",
    "OpenAIHTTPException",
    "engine_client",
    "first_error",
    "to_model_metadata",
]


def engine_client(server: Any) -> Any:
    """vLLM's client of the engine process behind an LLMServer; None before it has started."""
    return server.engine and server.engine._engine_client


def first_error(chunk: Any) -> Any:
    """The ErrorResponse in a streamed chunk (an SSE event, or a batch of them), if it begins so."""
    event = chunk[0] if isinstance(chunk, list) and chunk else chunk
    if not isinstance(event, str) or not event.startswith('data: {"error"'):
        return None
    return ErrorResponse(error=ErrorInfo(**json.loads(event.removeprefix("data: "))["error"]))
