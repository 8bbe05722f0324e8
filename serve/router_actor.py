"""The router's process: a Ray actor, which Ray starts again wherever and however it dies.

It listens itself, so that a request passes no other process on its way to an engine. Its event loop
has a thread of its own; Ray's calls only hand it what workers say.

There are two of them. Whichever gets the port serves; the other knows the workers as well, keeps a
connection to it, and tries for the port when that breaks, which is at the other's death. The one
that Ray starts again then is the spare.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.storage import open_storage
from ebbtide.serve.books import FLUSH_S, Books
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.fleet import Beat, Fleet
from ebbtide.serve.http_server import HttpServer, new_event_loop, until_it_ends
from ebbtide.serve.keys import ApiKey
from ebbtide.serve.relay import Json, Relay
from ebbtide.serve.router import Door, Router
from ebbtide.serve.router_metrics import RouterMetrics
from ebbtide.serve.scaling import Known
from ebbtide.serve.split import Mode, Settings
from ebbtide.serve.stages import Cost
from ebbtide.serve.traces import Traces
from ebbtide.serve.watch import Watch
from ebbtide.serve.worker_client import Refused, connected

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_S = 30.0
_TRY_S = 0.05
_WARM_UP_PROMPTS: tuple[tuple[Mode, list[int]], ...] = (("split", [0]), ("colocated", [1]))


def router_names(config: ServeConfig) -> tuple[str, str]:
    """The actors' names, by which workers find them; the first is the one to serve at first."""
    return f"router-{config.name}-0", f"router-{config.name}-1"


def open_note(config: ServeConfig) -> str:
    """Where the open generations are noted, for a router that is started again."""
    return f"open-{config.name}"


def _settings(config: ServeConfig) -> Settings:
    found = Settings(config.mode, config.split_min_tokens, config.stall_s)
    if config.scales:
        found = replace(
            found,
            scales=True,
            may_be_none=config.may_be_none,
            wait_s=config.scaling.wait_s,
            max_waiting=config.scaling.max_waiting,
        )
    return found


class RouterProcess:
    """What the actor is. The constructor returns when the endpoint listens, here or elsewhere, or
    raises."""

    def __init__(self, config: ServeConfig, keys: list[ApiKey], token: str) -> None:
        from ebbtide.platform.ray_seam.serve import noted

        self._config, self._keys, self._token = config, keys, token
        self._fleet = Fleet()
        self._fleet.open = frozenset(map(int, (noted(open_note(config)) or "1").split()))
        self._prices = {role: own.usd_per_hour for role, own in config.roles.items()}
        self._books = None if config.ledger is None else Books(self._prices)
        self._ledger: LedgerWriter | None = None
        passed_on = "otlp_traces_endpoint" in config.engine
        self._traces = Traces(config.traces, config.name, passed_on)
        self._loop = new_event_loop()
        self._error: BaseException | None = None
        self._listens = False
        self._started = threading.Event()
        threading.Thread(target=self._run, name="router", daemon=True).start()
        if not self._started.wait(_START_S) or self._error is not None:
            raise RuntimeError(f"the router does not listen: {self._error or 'too slow'}")

    def beat(self, beat: Beat) -> None:
        """A worker lives."""
        self._loop.call_soon_threadsafe(self._heard, beat, time.monotonic(), time.time())

    def _heard(self, beat: Beat, now_s: float, epoch_s: float) -> None:
        self._fleet.beat(beat, now_s)
        if self._books is not None:
            self._books.beat(beat, epoch_s)

    def close_books(self) -> None:
        """The endpoint is about to end: have the ledger and the traces whole on their storage."""

        async def closed() -> None:
            self._router.close_books()
            self._books = None  # also if this one is to serve for a moment when the other has ended

        asyncio.run_coroutine_threadsafe(closed(), self._loop).result()
        if self._ledger is not None:
            self._ledger.close()
        self._traces.close()

    def listens(self) -> bool:
        """Whether this one has the port; if not, it is the spare."""
        return self._listens

    def ready(self, generation: int | None = None) -> dict[str, int]:
        """How many workers of each role get requests, or would if their generation were open."""
        fleet, now_s = self._fleet, time.monotonic()
        return {role: len(fleet.ready(role, now_s, generation)) for role in ("prefill", "decode")}

    def lead(self, generations: Iterable[int]) -> None:
        """Lead requests that come from now on to workers of these."""
        self._fleet.open = frozenset(generations)

    def num_at_work(self, generation: int) -> int:
        """How many requests workers of a generation have begun."""
        return self._in_loop(lambda: self._relay.num_at_work(generation))

    def known(self) -> Known:
        """What the number of workers is decided by, since this was asked before."""
        return self._in_loop(lambda: self._relay.known(time.monotonic()))

    def _in_loop(self, function: Callable[[], T]) -> T:
        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def prefills(self) -> dict[str, int]:
        """How many prompts were computed where."""
        return dict(self._relay.metrics.num_prefills)

    def set_mode(self, mode: Mode) -> None:
        """Lead requests that come from now on as in this mode, with the workers that there are."""
        self._relay.settings = replace(self._relay.settings, mode=mode)

    def warm_up(self, generation: int) -> None:
        """Have a request answered by both roles of a generation, and one by a decode worker alone.

        Raises RuntimeError with what the workers said.
        """
        for mode, prompt in _WARM_UP_PROMPTS:
            asked = {"model": self._config.model_name, "prompt": prompt, "max_tokens": 1}
            asking = self._ask(mode, asked, generation)
            done = asyncio.run_coroutine_threadsafe(asking, self._loop)
            try:
                done.result()
            except Refused as refused:
                raise RuntimeError(refused.__cause__ or refused.body["error"]["message"]) from None

    async def _ask(self, mode: Mode, request: Json, generation: int) -> None:
        relay = replace(self._relay, settings=replace(self._relay.settings, mode=mode))

        async def ignore(status: int, data: bytes, more: bool) -> None:
            return None

        await relay.whole("completion", request, ignore, Cost(), generation)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
            if self._started.is_set():
                log.exception("the router ends")
                os._exit(1)  # for Ray to start another
            self._started.set()

    async def _serve(self) -> None:
        config = self._config
        async with connected(self._token) as client:
            metrics = RouterMetrics(self._prices)
            settings = _settings(config)
            relay = self._relay = Relay(self._fleet, settings, metrics, client)
            door = Door(
                (config.model_name,), self._keys, config.http.limits, config.http.max_body_bytes
            )
            watching = asyncio.create_task(
                Watch(self._fleet, client, metrics, settings.stall_s).run()
            )
            self._router = Router(door, self._fleet, metrics, relay, self._books, self._traces)
            server = await self._listening(self._router)
            await server.start()
            keeping = asyncio.create_task(self._keep_books())
            self._fleet.replica_s = {"prefill": 0.0, "decode": 0.0}  # as tokens, from now on
            self._listens = True
            self._started.set()
            await asyncio.wait(
                {watching, keeping, asyncio.create_task(server.wait())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            raise RuntimeError("the router's server has ended")

    async def _keep_books(self) -> None:
        uri = self._config.ledger
        if uri is not None:
            self._ledger = await asyncio.to_thread(
                lambda: LedgerWriter(open_storage(uri), name="router")
            )
        if self._books is not None and self._ledger is not None:
            self._books.open(self._ledger)
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._books is not None:
                self._books.tick(time.time())

    async def _listening(self, router: Router) -> HttpServer:
        """The server, once it has the port."""
        http = self._config.http
        while True:
            try:
                return HttpServer(
                    router, http.host, http.port, http.tls_certificate, http.tls_key or ""
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            self._started.set()  # as the spare
            await asyncio.sleep(_TRY_S)
            await until_it_ends(http.host, http.port)
