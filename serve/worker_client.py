"""One request at one worker, over HTTP: what it answers, and whether it is lost on the way.

Promises: a fault of the request is told apart from one of the worker, whose words do not reach
clients; whoever waits for a worker that is let go gets :class:`Lost` at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from ebbtide.serve import envelope
from ebbtide.serve.fleet import SHUNNED_S, Worker

log = logging.getLogger(__name__)

Json = dict[str, Any]

TOKEN_HEADER = "x-ebbtide-token"
"""How a router shows a worker that it may ask."""

RELEASE_PATH = "/kv/release"
"""Where a decode worker is told that it will not fetch what a prefill worker keeps for it."""

ALIVE_PATH = "/alive"
"""Where a replica says at once that it lives, and whether its engine is stopped."""

_CONNECT_S = 1.0
_ASIDE = aiohttp.ClientTimeout(total=5.0, sock_connect=_CONNECT_S)
"""For what a worker answers at once or not at all."""
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
_OURS = (401, 403, 408, 429)
"""What a worker says to the router, not to its client."""


class Refused(Exception):
    """A worker found fault with the request, or there is none; the client is told.

    ``retry_after_s``: after which it may be asked again.
    """

    def __init__(self, status: int, body: Json, retry_after_s: int | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.retry_after_s = status, body, retry_after_s


class Lost(Exception):
    """A worker did not answer to the end; ``spoke`` if it said so itself, and lives."""

    def __init__(self, why: str, *, spoke: bool = False) -> None:
        super().__init__(why)
        self.spoke = spoke


@dataclass(eq=False)
class Leg:
    """One request at one worker.

    ``asked_s``: when it began; ``can_move``: another worker can still do it; ``is_sending``: its
    client is being waited for; ``is_bound``: only workers with the same model can go on.
    """

    worker: Worker
    sending: asyncio.Future[aiohttp.ClientResponse] | None = None
    response: aiohttp.ClientResponse | None = None
    has_begun: bool = False
    has_moved: bool = False
    can_move: bool = True
    is_sending: bool = False
    is_bound: bool = False
    is_lost: bool = False
    asked_s: float = field(default_factory=time.monotonic)
    headers: Mapping[str, str] = field(default_factory=dict)

    def let_go(self) -> None:
        """Whoever waits for the worker gets Lost."""
        self.is_lost = True
        if self.response is not None:
            self.response.close()
        elif self.sending is not None:
            self.sending.cancel()


@dataclass
class WorkerClient:
    """Asks workers. ``legs`` are the requests that wait for one now, ``is_busy`` whether there are
    any; the last ended at ``last_s``."""

    session: aiohttp.ClientSession
    token: str
    legs: set[Leg] = field(default_factory=set)
    last_s: float = field(default_factory=time.monotonic)
    is_busy: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def at(
        self, worker: Worker, keys: list[int], headers: Mapping[str, str] | None = None
    ) -> Iterator[Leg]:
        """A request at a worker, which is shunned for a while if it breaks off without a word."""
        leg = Leg(worker, headers=headers or {})
        worker.num_requests += 1
        worker.prefixes.add(keys)
        self.legs.add(leg)
        self.is_busy.set()
        try:
            yield leg
        except Lost as lost:
            if not lost.spoke:
                worker.shunned_until_s = time.monotonic() + SHUNNED_S
            log.warning("worker %s is left: %s", worker.last.worker_id, lost)
            raise
        finally:
            self.legs.discard(leg)
            if not self.legs:
                self.is_busy.clear()
            self.last_s = time.monotonic()
            worker.num_requests -= 1

    @contextlib.asynccontextmanager
    async def _request(self, leg: Leg, path: str, body: Json) -> AsyncIterator[Any]:
        """A worker's response with status 200. Raises Lost, Refused."""
        headers = {**leg.headers, "content-type": "application/json", TOKEN_HEADER: self.token}
        sending = asyncio.ensure_future(
            self.session.post(leg.worker.last.url + path, data=to_json(body), headers=headers)
        )
        leg.sending = sending
        try:
            async with await sending as response:
                leg.response = response
                if response.status != 200:
                    raise _refused(response.status, await response.read())
                yield response
        except _BROKEN as error:
            raise Lost(f"{type(error).__name__} {error}") from error
        except asyncio.CancelledError:
            if leg.is_lost:
                raise Lost("it hangs") from None
            sending.cancel()
            raise

    async def post(self, leg: Leg, path: str, body: Json) -> Json:
        async with self._request(leg, path, body) as response:
            answer: Json = from_json(await response.read())
            return answer

    async def page(self, worker: Worker, path: str) -> Json:
        """What a worker tells at ``path``. Raises Lost."""
        headers = {TOKEN_HEADER: self.token}
        try:
            async with self.session.get(
                worker.last.url + path, headers=headers, timeout=_ASIDE
            ) as response:
                response.raise_for_status()
                found: Json = from_json(await response.read())
                return found
        except (*_BROKEN, ValueError) as error:  # another program may have its port by now
            raise Lost(repr(error)) from error

    async def is_stopped(self, worker: Worker) -> bool:
        """Whether a worker that answers has an engine that is stopped. Raises Lost."""
        found: Any = await self.page(worker, ALIVE_PATH)
        return isinstance(found, dict) and bool(found.get("is_stopped"))

    async def release(self, worker: Worker, params: Json) -> None:
        """Have the keys and values that nobody will fetch given up; else a lease ends in 30 s."""
        url, headers = worker.last.url + RELEASE_PATH, {TOKEN_HEADER: self.token}
        try:
            async with self.session.post(
                url, data=to_json(params), headers=headers, timeout=_ASIDE
            ) as response:
                response.raise_for_status()
        except _BROKEN as error:
            log.warning("keys and values are kept until their lease ends: %r", error)

    async def events(self, leg: Leg, path: str, body: Json) -> AsyncGenerator[bytes]:
        async with self._request(leg, path, body) as response:
            rest = b""
            async for data in response.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: "):
                        yield event[6:]


def _refused(status: int, body: bytes) -> Exception:
    """What a worker's answer with another status than 200 means."""
    try:
        error = from_json(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = {}
    return fault({**error, "code": status}, has_begun=False)


def fault(error: Json, *, has_begun: bool) -> Exception:
    """The client's fault, which it is told, or the worker's, whose words it is not."""
    status = error.get("code")
    if has_begun or not isinstance(status, int) or not 400 <= status < 500 or status in _OURS:
        return Lost(f"answered {status}: {error.get('message')}", spoke=True)
    message = str(error.get("message") or "the request cannot be answered")
    return Refused(status, envelope.body(status, message, param=error.get("param")))


@contextlib.asynccontextmanager
async def connected(token: str) -> AsyncIterator[WorkerClient]:
    """A client with connections that are kept."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, read_bufsize=2**18
    ) as session:
        yield WorkerClient(session, token)
