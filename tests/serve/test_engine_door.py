"""An engine answers its router only, and only what routers ask."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbtide.serve.engine_door import EngineDoor

TOKEN = "0123456789abcdef"


async def asked(door: EngineDoor, path: str, token: str | None) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"x-ebbtide-token", token.encode())] if token is not None else []
    await door({"type": "http", "path": path, "headers": headers}, None, send)
    return statuses[0]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/v1/completions", TOKEN, 200),
        ("/v1/chat/completions", TOKEN, 200),
        ("/metrics", TOKEN, 200),
        ("/v1/completions", None, 403),
        ("/v1/completions", TOKEN + "0", 403),
        ("/v1/completions", "", 403),
        ("/tokenize", TOKEN, 403),
        ("/collective_rpc", TOKEN, 403),
        ("/metrics", None, 403),
    ],
)
def test_who_is_let_in(path: str, token: str | None, status: int) -> None:
    assert asyncio.run(asked(EngineDoor(app, TOKEN), path, token)) == status


def test_idle_is_when_nothing_is_answered() -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await app(scope, receive, send)

        door = EngineDoor(slow, TOKEN)
        await door.idle()
        asking = asyncio.create_task(asked(door, "/v1/completions", TOKEN))
        await begun.wait()
        idle = asyncio.create_task(door.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        go_on.set()
        await asking
        await idle

    asyncio.run(main())
