"""The door before vLLM's own application: routers only, and only what routers ask for."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from ebbtide.serve.stream import PATHS
from ebbtide.serve.worker_client import TOKEN_HEADER

_OPEN_PATHS = {*PATHS.values(), "/health", "/metrics"}


class EngineDoor:
    """An ASGI application around another. ``token`` is the router's; it is in no log."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request in, or answer 403."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        name = TOKEN_HEADER.encode()
        given = next((value for key, value in scope["headers"] if key == name), b"")
        if scope["path"] not in _OPEN_PATHS or not hmac.compare_digest(given, self._token):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            return await send({"type": "http.response.body", "body": b"{}"})  # type: ignore[no-any-return]
        self._num_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def idle(self) -> None:
        """Block until no request is being answered."""
        await self._idle.wait()
