"""The door before vLLM's own application: routers only, and only what routers ask for."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic_core import from_json, to_json

from ebbtide.serve import envelope
from ebbtide.serve.stream import PATHS
from ebbtide.serve.worker_client import ALIVE_PATH, RELEASE_PATH, TOKEN_HEADER

_OPEN_PATHS = {*PATHS.values(), "/health", "/metrics", "/openapi.json", RELEASE_PATH} | {ALIVE_PATH}

Release = Callable[[dict[str, Any]], Awaitable[None]]
"""Tells a prefill worker, by the ``kv_transfer_params`` that it gave, to keep them no longer."""
IsStopped = Callable[[], bool]
"""Whether the engine is stopped, at once."""


class EngineDoor:
    """An ASGI application around another. ``token`` is the router's; it is in no log."""

    def __init__(self, app: Any, token: str, release: Release, is_stopped: IsStopped) -> None:
        self._app, self._token = app, token.encode()
        self._release, self._is_stopped = release, is_stopped
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
        if scope["path"] == RELEASE_PATH:
            return await self._release_keys(receive, send)
        if scope["path"] == ALIVE_PATH:
            return await _say(send, {"is_stopped": self._is_stopped()})
        self._num_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def _release_keys(self, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await self._release(from_json(body))
        await _say(send, {})

    async def idle(self) -> None:
        """Block until no request is being answered."""
        await self._idle.wait()


async def _say(send: Any, value: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": to_json(value)})


def refuse_unreadable(app: FastAPI) -> None:
    """Let vLLM answer 400, not 500, where its own checks of a request trip over a field's type."""
    for kind in (AttributeError, KeyError, IndexError):
        app.add_exception_handler(kind, _unreadable)
    app.middleware_stack = None  # built already; Starlette does it again at the first request


async def _unreadable(request: Request, error: Exception) -> JSONResponse:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != "solve_dependencies":
        trace = trace.tb_next
    if trace is None:  # not while FastAPI read the request
        raise error
    text = "a field of the request has a value of a wrong type"
    return JSONResponse(envelope.body(400, text), status_code=400)
