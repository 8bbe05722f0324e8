"""A router over stand-in workers, all on real sockets, and a client that reads streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import aiohttp

from ebbtide.serve.books import Books
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import Beat, Fleet
from ebbtide.serve.http_server import HttpServer
from ebbtide.serve.relay import Relay
from ebbtide.serve.router import Door, Router
from ebbtide.serve.router_metrics import RouterMetrics
from ebbtide.serve.split import Settings
from ebbtide.serve.traces import Traces
from ebbtide.serve.watch import Watch
from ebbtide.serve.worker_client import connected
from tests.serve.stand_in import TOKEN, StandIn

MODEL = "m"


@dataclass
class Answer:
    """What a client got: status, its JSON, or a stream's events; whether it ended as it should."""

    status: int
    headers: dict[str, str]
    body: Any = None
    events: list[Any] = field(default_factory=list)
    is_done: bool = False
    is_broken: bool = False
    gaps_s: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The joined text of a stream."""
        choices = [c for event in self.events for c in event.get("choices", [])]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)

    @property
    def usage(self) -> Any:
        """The last usage block of a stream."""
        return [event["usage"] for event in self.events if event.get("usage")][-1]

    @property
    def finish_reasons(self) -> list[str]:
        choices = [c for event in self.events for c in event.get("choices", [])]
        return [c["finish_reason"] for c in choices if c.get("finish_reason")]


async def read(
    session: aiohttp.ClientSession, url: str, path: str = "/v1/completions", **request: Any
) -> Answer:
    """Post a request to an endpoint, and read the answer to its end."""
    body = {"model": MODEL, "temperature": 0, **request}
    async with session.post(url + path, json=body) as response:
        answer = Answer(response.status, dict(response.headers))
        if not response.headers["content-type"].startswith("text/event-stream"):
            answer.body = await response.json()
            return answer
        last_s = time.monotonic()
        try:
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    answer.is_done = True
                elif line.startswith(b"data: "):
                    answer.events.append(json.loads(line[6:].decode()))
                    now_s = time.monotonic()
                    answer.gaps_s.append(now_s - last_s)
                    last_s = now_s
        except aiohttp.ClientError:
            answer.is_broken = True
        return answer


@dataclass
class SmallEndpoint:
    """The router's address, its fleet, and the workers behind it."""

    url: str
    fleet: Fleet
    workers: list[StandIn]
    session: aiohttp.ClientSession
    metrics: RouterMetrics
    relay: Relay
    router: Router
    watch: Watch
    beating: set[str] = field(default_factory=set)

    def num_running(self) -> int:
        """Requests that the router is at work on."""
        text = self.metrics.text(self.fleet, time.monotonic()).decode()
        return int(float(text.split("\nebbtide_running_requests ")[1].split()[0]))

    async def ask(self, path: str = "/v1/completions", **request: Any) -> Answer:
        """Post a request, and read the answer to its end."""
        return await read(self.session, self.url, path, **request)

    def forgive(self) -> None:
        """Let no worker be shunned for what it has done."""
        for worker in self.fleet.workers():
            worker.shunned_until_s = 0.0

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """The status and the text of a page."""
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def small_endpoint(
    decode: Sequence[StandIn] = (),
    prefill: Sequence[StandIn] = (),
    *,
    door: Door | None = None,
    settings: Settings | None = None,
    beating: bool = True,
    books: Books | None = None,
    traces: Traces | None = None,
) -> AsyncIterator[SmallEndpoint]:
    """Workers that beat, a router over them, and a client."""
    fleet, metrics = Fleet(), RouterMetrics({"decode": Decimal(36)})
    settings = settings or Settings("auto", 64, 0.5)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(TOKEN))
        relay = Relay(fleet, settings, metrics, client)
        watch = Watch(fleet, client, metrics, settings.stall_s)
        traces = traces or Traces(None, MODEL, is_passed_on=False)
        router = Router(door or Door((MODEL,)), fleet, metrics, relay, books, traces)
        server = HttpServer(router, "127.0.0.1")
        await server.start()
        stack.push_async_callback(server.stop)
        url = f"http://127.0.0.1:{server.port}"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        found = SmallEndpoint(
            url, fleet, [*decode, *prefill], session, metrics, relay, router, watch
        )
        beats: list[tuple[str, Role, StandIn]] = []
        for number, worker in enumerate(found.workers):
            await worker.start()
            stack.push_async_callback(worker.stop)
            role: Role = "decode" if number < len(decode) else "prefill"
            beats.append((f"w{number}", role, worker))
        names = {name for name, _, _ in beats}
        found.beating = names if beating else set()

        async def beat() -> None:
            while True:
                for name, role, worker in beats:
                    if name in found.beating:
                        told = Beat(
                            name,
                            role,
                            worker.url,
                            worker.max_model_len,
                            generation=worker.generation,
                        )
                        fleet.beat(told, time.monotonic())
                        if books is not None:
                            books.beat(told, time.time())
                await asyncio.sleep(0.1)

        tasks = [asyncio.create_task(beat()), asyncio.create_task(watch.run())]
        await asyncio.sleep(0)
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
