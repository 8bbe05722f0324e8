"""What runs inside the engine replicas: Ray's prefill and decode servers, corrected, and the model.

Imports vLLM, so only replicas and the builder import this module.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ray.serve.llm.deployment import LLMServer, PDDecodeServer, PDPrefillServer

from ebbtide.platform.errors import ServeError
from ebbtide.platform.ray_seam.llm import CallbackBase, engine_client, first_error
from ebbtide.serve.engine import ENGINE_STOP_S
from ebbtide.serve.model_files import fetch
from ebbtide.serve.shared_memory import detach_tracker
from ebbtide.serve.split import prefill_where
from ebbtide.serve.startup import reason

_MAX_LOG_BYTES = 2**20


class LocalModel(CallbackBase):  # type: ignore[misc]  # Ray ships no types
    """Makes the model local to the replica's node and verifies it, before the engine starts.

    It takes the place of Ray's own download, which starts another process that imports vLLM.
    """

    async def on_before_node_init(self) -> None:
        folder = await asyncio.to_thread(fetch, self.kwargs["uri"])
        self.llm_config.get_engine_config().hf_model_id = str(folder)
        self.ctx.run_init_node = False


class _Orderly:
    """Says why the engine did not start, and ends its processes when the replica ends, which Ray
    leaves to be killed; their shared memory is removed in any case."""

    async def start(self) -> None:
        detach_tracker()
        try:
            await super().start()  # type: ignore[misc]  # Ray's server comes after this class
        except Exception as error:
            raise ServeError(reason(error, _own_log())) from error

    async def __del__(self) -> None:
        client = engine_client(self)
        if client is not None:
            await asyncio.to_thread(client.shutdown, ENGINE_STOP_S)


def _own_log() -> str:
    """The end of what this process and its engine have written to stderr, which Ray keeps."""
    path = Path(os.path.realpath("/proc/self/fd/2"))
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
        return file.read().decode(errors="replace")


class PrefillServer(_Orderly, PDPrefillServer):  # type: ignore[misc]  # Ray ships no types
    """Computes a prompt and its first token, which the decode server computes again and keeps.

    Ray asks it for exactly one token but leaves ``min_tokens`` as it was, which vLLM then refuses.
    """

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:
        request.min_tokens = 0
        return await super().completions(request, raw_request_info)  # type: ignore[no-any-return]

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:
        request.min_tokens = 0
        return await super().chat(request, raw_request_info)  # type: ignore[no-any-return]


async def refused_at_once(stream: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    """A stream whose first event is an error, as that error: the status is still to be sent."""
    is_first = True
    async for chunk in stream:
        error = first_error(chunk) if is_first else None
        yield chunk if error is None else error
        if error is not None:
            return
        is_first = False


class DecodeServer(_Orderly, PDDecodeServer):  # type: ignore[misc]  # Ray ships no types
    """Has a request's prompt computed elsewhere where that is possible, and produces its tokens.

    Ray would hand the first prompt's keys and values to every sequence of the request.
    """

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:
        if prefill_where(request) == "local":
            answer = await LLMServer.completions(self, request, raw_request_info)
        else:
            answer = await super().completions(request, raw_request_info)
        return refused_at_once(answer)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:
        if prefill_where(request) == "local":
            answer = await LLMServer.chat(self, request, raw_request_info)
        else:
            answer = await super().chat(request, raw_request_info)
        return refused_at_once(answer)
