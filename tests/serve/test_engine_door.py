"""An engine answers its router only, and only what routers ask."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from ebbtide.serve.engine_door import EngineDoor, refuse_unreadable


class Asked(BaseModel):
    """With a check that trips over what it does not expect, as vLLM's do."""

    options: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        values["options"].get("x")
        return values


TOKEN = "0123456789abcdef"


async def asked(door: EngineDoor, path: str, token: str | None, receive: Any = None) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"x-ebbtide-token", token.encode())] if token is not None else []
    await door({"type": "http", "path": path, "headers": headers}, receive, send)
    return statuses[0]


async def release(params: dict[str, Any]) -> None:
    raise AssertionError("not asked for")


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/v1/completions", TOKEN, 200),
        ("/v1/chat/completions", TOKEN, 200),
        ("/metrics", TOKEN, 200),
        ("/alive", TOKEN, 200),
        ("/alive", None, 403),
        ("/v1/completions", None, 403),
        ("/v1/completions", TOKEN + "0", 403),
        ("/v1/completions", "", 403),
        ("/tokenize", TOKEN, 403),
        ("/collective_rpc", TOKEN, 403),
        ("/metrics", None, 403),
    ],
)
def test_who_is_let_in(path: str, token: str | None, status: int) -> None:
    assert asyncio.run(asked(EngineDoor(app, TOKEN, release, bool), path, token)) == status


@pytest.mark.parametrize(("token", "expected"), [(TOKEN, [{"remote_port": 7}]), ("else", [])])
def test_a_router_gives_up_what_a_worker_will_not_fetch(token: str, expected: list[Any]) -> None:
    released: list[dict[str, Any]] = []
    bodies = [{"body": b'{"remote', "more_body": True}, {"body": b'_port": 7}'}]

    async def note(params: dict[str, Any]) -> None:
        released.append(params)

    async def receive() -> Any:
        return bodies.pop(0)

    status = asyncio.run(asked(EngineDoor(app, TOKEN, note, bool), "/kv/release", token, receive))
    assert status == (200 if expected else 403)
    assert released == expected


def test_idle_is_when_nothing_is_answered() -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await app(scope, receive, send)

        door = EngineDoor(slow, TOKEN, release, bool)
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


def test_what_cannot_be_read_is_the_clients_fault_and_what_fails_later_is_not() -> None:
    app = FastAPI()

    @app.post("/ask")
    def ask(asked: Asked) -> None:
        raise AttributeError("of the engine")

    app.middleware_stack = app.build_middleware_stack()  # as vLLM leaves it
    refuse_unreadable(app)
    client = TestClient(app, raise_server_exceptions=False)
    assert client.post("/ask", json={"options": 1}).status_code == 400
    assert client.post("/ask", json={"options": 1}).json()["error"]["message"]
    assert client.post("/ask", json={"options": {}}).status_code == 500
