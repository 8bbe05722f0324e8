"""What runs inside the engine replicas: Ray's LLM server, its model, and vLLM's own API on a port.

A request comes from the router straight to vLLM's application in this process, past Ray Serve,
which starts, watches and ends the replica. Imports vLLM, so only replicas and the builder import
this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import aiohttp

from ebbtide.platform.errors import ServeError
from ebbtide.platform.ray_seam.forked import fork_children
from ebbtide.platform.ray_seam.llm import (
    CallbackBase,
    Engine,
    Server,
    engine_app,
    engine_client,
)
from ebbtide.serve import engine_processes
from ebbtide.serve.beats import Pulse
from ebbtide.serve.config import Role
from ebbtide.serve.engine import ENGINE_STOP_S
from ebbtide.serve.engine_door import EngineDoor, refuse_unreadable
from ebbtide.serve.engine_sockets import socket_folder
from ebbtide.serve.http_server import HttpServer
from ebbtide.serve.local_model import prepared
from ebbtide.serve.shared_memory import detach_tracker
from ebbtide.serve.startup import reason
from ebbtide.serve.stream import PATHS
from ebbtide.serve.worker_client import TOKEN_HEADER

log = logging.getLogger(__name__)

_DRAIN_S = 15.0
_MAX_LOG_BYTES = 2**20


class LocalModel(CallbackBase):  # type: ignore[misc]  # Ray ships no types
    """Makes the models local to the replica's node and verifies them, before the engine starts.

    It takes the place of Ray's own download, which starts another process that imports vLLM.
    """

    async def on_before_node_init(self) -> None:
        uri, quantization = self.kwargs["uri"], self.kwargs["quantization"]
        folder = await asyncio.to_thread(prepared, uri, quantization)
        if (draft := self.kwargs["draft"]) is not None:
            path = str(await asyncio.to_thread(prepared, draft, None))
            options = self.llm_config.engine_kwargs["speculative_config"]
            self.llm_config.update_engine_kwargs(speculative_config={**options, "model": path})
        self.llm_config.get_engine_config().hf_model_id = str(folder)
        self.ctx.run_init_node = False


class EngineServer(Server):
    """One engine behind vLLM's application, which only holders of ``token`` may use.

    Says why the engine did not start. When the replica ends, the router is told first, what the
    engine has begun is ended, and then its processes, which Ray leaves to be killed; their shared
    memory is removed in any case.
    """

    _default_engine_cls = Engine

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        llm_config: Any,
        role: Role,
        routers: tuple[str, ...],
        token: str,
        host: str | None,
        generation: int,
    ) -> None:
        self._role: Role = role
        self._generation = generation
        self._routers, self._token, self._host = routers, token, host
        self._http: HttpServer | None = None
        self._pulse: Pulse | None = None
        self._folders = contextlib.ExitStack()
        await super().__init__(llm_config)

    async def start(self) -> None:
        """Start the engine, then its application, then tell the router. Raises ServeError."""
        detach_tracker()
        fork_children()
        self._folders.enter_context(socket_folder(self._token))
        try:
            await super().start()
        except Exception as error:
            raise ServeError(reason(error, _own_log())) from error
        app = await engine_app(self)
        refuse_unreadable(app)
        processes = engine_processes.of_replica(os.getpid())
        self._door = EngineDoor(
            app, self._token, self._release, lambda: engine_processes.is_stopped(processes)
        )
        host = self._host or _node_address()
        self._http = HttpServer(self._door, host)
        await self._http.start()
        url = f"http://{host}:{self._http.port}"
        await warm_up(url, self._llm_config.model_id, self._token)
        self._pulse = Pulse(engine_client(self), self._routers, self._role, url, self._generation)
        self._pulse.start()

    async def _release(self, params: dict[str, Any]) -> None:
        """Have the prefill worker that ``params`` are from give up what it keeps for this one."""
        name = f"release-{secrets.token_hex(8)}"
        await engine_client(self).notify_kv_transfer_request_rejected(name, params)

    async def check_health(self) -> None:
        """What Ray Serve asks every few seconds; one that fails is replaced. Raises ServeError."""
        await super().check_health()
        if self._pulse is not None:
            self._pulse.check()

    async def __del__(self) -> None:
        try:
            if self._pulse is not None:
                await self._pulse.leave(self._door.idle(), _DRAIN_S)
            client = engine_client(self)
            if client is not None:
                await asyncio.to_thread(client.shutdown, ENGINE_STOP_S)
        finally:
            self._folders.close()


async def warm_up(url: str, model: str, token: str) -> None:
    """An engine's first request, which takes it seconds. Raises ServeError if it fails."""
    body = {"model": model, "prompt": [0], "max_tokens": 2, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(headers={TOKEN_HEADER: token}) as session,
        session.post(url + PATHS["completion"], json=body) as response,
    ):
        if response.status != 200:
            raise ServeError(f"the engine's first request failed: {await response.text()}")


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _own_log() -> str:
    """The end of what this process and its engine have written to stderr, which Ray keeps."""
    path = Path(os.path.realpath("/proc/self/fd/2"))
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
        return file.read().decode(errors="replace")
