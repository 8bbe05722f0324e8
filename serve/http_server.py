"""An ASGI application on a socket of its own, within a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in, and waits for its end; uvicorn's own looks ten
    times a second whether it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves from :meth:`start` on, until :meth:`stop` or the end of the process."""

    def __init__(
        self, app: Any, host: str, port: int = 0, certificate: str | None = None, key: str = ""
    ) -> None:
        self._socket = listening(host, port)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            lifespan="auto",
            timeout_keep_alive=75,
            ssl_certfile=certificate,
            ssl_keyfile=key or None,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens, also if any port would do."""
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Return when requests are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Block for as long as it serves."""
        assert self._task is not None
        await self._task

    async def stop(self) -> None:
        """End it, with what it is answering."""
        self._server.should_exit = self._server.force_exit = True
        self._server.ended.set()
        if self._task is not None:
            await self._task


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, as it is with vLLM; else Python's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def until_it_ends(host: str, port: int) -> None:
    """Return when the process that listens at a port has ended: when the connection to it breaks
    that says nothing. At once if nobody listens, or as soon as its other end will have no such."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            await reader.read()
        finally:
            writer.close()


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except BaseException:
        found.close()
        raise
    return found
