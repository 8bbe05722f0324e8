"""The endpoint's door: who may ask, how much, and for what; then :mod:`ebbtide.serve.relay`.

A bare ASGI application, for every token passes it. Promises: whatever a client sends is answered
in the OpenAI API's envelope, with a status below 500 where the client is at fault; no exception's
text reaches a client; fields by which workers talk to each other are taken out of requests; a
client that has gone is noticed, and its request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from ebbtide.serve import envelope, openapi
from ebbtide.serve.books import Books, served
from ebbtide.serve.fleet import Fleet
from ebbtide.serve.keys import ANYONE, ApiKey, Limits, identify
from ebbtide.serve.limits import Usage
from ebbtide.serve.relay import Json, Relay, Send
from ebbtide.serve.router_metrics import RouterMetrics
from ebbtide.serve.stages import Cost
from ebbtide.serve.stream import Kind
from ebbtide.serve.traces import Traces
from ebbtide.serve.worker_client import Lost, Refused

log = logging.getLogger(__name__)

_KINDS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id")
_PAGES = ("/health", "/ready", "/metrics", "/openapi.json", "/v1/models")
_BODY_S = 60.0
_OPEN = ("/health", "/ready")
"""What is answered without a key, so that a load balancer can ask."""


@dataclass(frozen=True)
class Door:
    """What is served, to whom, and up to which size."""

    models: Sequence[str]
    keys: Sequence[ApiKey] = ()
    limits: Limits = Limits()
    max_body_bytes: int = 4 * 2**20


class _Gone(Exception):
    """The client has left."""


class _Answer:
    """One answer on its way: what has been said of it, and by which ASGI call."""

    def __init__(self, send: Callable[[Json], Awaitable[None]]) -> None:
        self._send = send
        self.status, self.is_complete = 0, False
        self.kind = b"application/json"

    async def __call__(
        self, status: int, data: bytes, more: bool, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        if not self.status:
            self.status = status
            fields = [(b"content-type", self.kind), *headers]
            if not more:
                fields.append((b"content-length", str(len(data)).encode()))
            await self._send({"type": "http.response.start", "status": status, "headers": fields})
        self.is_complete = self.is_complete or not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


@dataclass
class Router:
    """The ASGI application. ``relay`` is made within its event loop."""

    door: Door
    fleet: Fleet
    metrics: RouterMetrics
    relay: Relay
    books: Books | None = None
    traces: Traces = field(default_factory=lambda: Traces(None, "", False))
    _usage: dict[str, Usage] = field(default_factory=dict)
    _at_work: dict[int, tuple[str, Cost]] = field(default_factory=dict)
    _described: Json | None = None

    async def __call__(self, scope: Json, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        answer, key = _Answer(send), None
        path = scope["path"]
        try:
            if path not in _OPEN:
                key = self._identified(scope)
            await self._route(scope, receive, answer, key)
        except Refused as refused:
            await self._refuse(answer, refused)
        except _Gone:
            answer.status = 499
        except Exception:
            log.exception("%s failed", path)
            if answer.status:
                raise  # a broken connection, not a clean end
            body = envelope.body(500, "internal error; the server's log has the details")
            await answer(500, to_json(body), False)
        finally:
            known = path if path in (*_KINDS, "/v1/models") else "other"
            if path not in (*_OPEN, "/metrics"):
                name = key.name if key else ANYONE
                self.metrics.requests.labels(name, known, str(answer.status)).inc()

    def close_books(self) -> None:
        """The endpoint is about to end: book what requests at work have had so far, and no more."""
        books, self.books, now_s = self.books, None, time.time()
        if books is not None:
            for name, cost in self._at_work.values():
                if cost.stages:
                    books.ended(served(name, cost, now_s))
            books.close(now_s)

    def _identified(self, scope: Json) -> ApiKey | None:
        if not self.door.keys:
            return None
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        key = identify(given.decode("latin-1"), self.door.keys)
        if key is None:
            raise _refusal(401, "a valid API key is needed: Authorization: Bearer KEY")
        return key

    async def _route(self, scope: Json, receive: Any, answer: _Answer, key: ApiKey | None) -> None:
        path, method = scope["path"], scope["method"]
        if path in _KINDS:
            if method != "POST":
                raise _refusal(405, f"{path} takes POST only")
            return await self._generate(scope, receive, answer, key)
        if path in _PAGES or path.startswith("/v1/models/"):
            if method not in ("GET", "HEAD"):
                raise _refusal(405, f"{path} takes GET only")
            return await self._tell(path, answer)
        raise _refusal(404, f"there is no {path} here")

    async def _tell(self, path: str, answer: _Answer) -> None:
        now_s = time.monotonic()
        ready = {role: len(self.fleet.ready(role, now_s)) for role in ("prefill", "decode")}
        if path == "/health":
            return await answer(200, b"{}", False)
        if path == "/ready":
            can = self.relay.settings.may_be_none or self.fleet.is_ready(now_s)
            return await answer(200 if can else 503, to_json({"ready": can, **ready}), False)
        if path == "/metrics":
            answer.kind = b"text/plain; version=0.0.4; charset=utf-8"
            return await answer(200, self.metrics.text(self.fleet, now_s), False)
        if path == "/openapi.json":
            return await answer(200, to_json(await self._description(now_s)), False)
        cards = {name: self._card(name) for name in self.door.models}
        if path == "/v1/models":
            body = {"object": "list", "data": list(cards.values())}
            return await answer(200, to_json(body), False)
        name = path.removeprefix("/v1/models/")
        if name not in cards:
            raise self._no_model(name)
        await answer(200, to_json(cards[name]), False)

    async def _description(self, now_s: float) -> Json:
        """What is served, as the workers describe it."""
        if self._described is None:
            told = await self._told_by_any("/openapi.json", now_s)
            self._described = openapi.public(told, (*_KINDS, *_PAGES), _INTERNAL_FIELDS)
        return self._described

    async def _told_by_any(self, path: str, now_s: float) -> Json:
        tried: set[str] = set()
        while (worker := self.fleet.for_decode([], now_s, tried)) is not None:
            tried.add(worker.last.url)
            with contextlib.suppress(Lost):
                return await self.relay.client.page(worker, path)
        raise _refusal(503, "no worker can answer; try again in a moment")

    def _card(self, name: str) -> Json:
        lengths = [each.last.max_model_len for each in self.fleet.of()]
        card: Json = {"id": name, "object": "model", "created": 0, "owned_by": "ebbtide"}
        return {**card, "max_model_len": min(lengths)} if lengths else card

    def _no_model(self, name: object) -> Refused:
        served = ", ".join(self.door.models)
        text = f"no model {name!r} here; this endpoint serves {served}"
        return Refused(404, envelope.body(404, text, param="model", code="model_not_found"))

    async def _generate(
        self, scope: Json, receive: Any, answer: _Answer, key: ApiKey | None
    ) -> None:
        usage = self._usage_of(key)
        if refusal := usage.admit(time.monotonic()):
            raise Limited(refusal.limit, refusal.retry_after_s)
        kind, name = _KINDS[scope["path"]], key.name if key else ANYONE
        trace = self.traces.begin(scope["path"], scope["headers"])
        cost = Cost(headers=trace.headers)
        self._at_work[id(cost)] = (name, cost)
        self.metrics.running.inc()
        status = 500
        try:
            request = self._accepted(await self._in_time(receive))
            if request.get("stream"):
                answer.kind = b"text/event-stream; charset=utf-8"
                lead = self.relay.stream
            else:
                lead = self.relay.whole
            await _while_there(receive, lead(kind, request, answer, cost), answer)
            status = answer.status
        except Refused as refused:
            status = answer.status or refused.status
            raise
        except _Gone:
            status = 499
            raise
        finally:
            self.metrics.running.dec()
            usage.end(cost.num_prompt_tokens + cost.num_output_tokens)
            self.metrics.count_tokens(name, cost.num_prompt_tokens, cost.num_output_tokens)
            if cost.stages:
                self.metrics.queue.observe(cost.stages[0].seconds)
            trace.end(cost, name, status)
            del self._at_work[id(cost)]
            if self.books is not None and status not in range(400, 499):  # refused
                self.books.ended(served(name, cost, time.time()))

    def _usage_of(self, key: ApiKey | None) -> Usage:
        name, own = (key.name, key.limits) if key else (ANYONE, None)
        return self._usage.setdefault(name, Usage(own or self.door.limits))

    async def _in_time(self, receive: Any) -> bytes:
        try:
            async with asyncio.timeout(_BODY_S):
                return await self._body(receive)
        except TimeoutError:
            raise _refusal(408, f"the body took longer than {_BODY_S:.0f} s") from None

    async def _body(self, receive: Any) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.door.max_body_bytes:
                raise _refusal(413, f"a request has at most {self.door.max_body_bytes} bytes")
        return bytes(body)

    def _accepted(self, body: bytes) -> Json:
        try:
            request = from_json(body)
        except ValueError:
            raise _refusal(400, "the body is not JSON in UTF-8") from None
        if not isinstance(request, dict):
            raise _refusal(400, "the body is not a JSON object")
        if (model := request.get("model")) is not None and model not in self.door.models:
            raise self._no_model(model)
        if not isinstance(request.get("stream"), bool | None):
            raise _refusal(400, "stream is true or false", param="stream")
        return {name: value for name, value in request.items() if name not in _INTERNAL_FIELDS}

    async def _refuse(self, answer: _Answer, refused: Refused) -> None:
        if answer.status:  # too late for a status
            return await answer(answer.status, b"data: " + to_json(refused.body) + b"\n\n", False)
        answer.kind, headers = b"application/json", []
        if refused.retry_after_s is not None:
            headers.append((b"retry-after", str(refused.retry_after_s).encode()))
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await answer(refused.status, to_json(refused.body), False, headers)


class Limited(Refused):
    """A limit of the key is reached."""

    def __init__(self, limit: str, retry_after_s: int) -> None:
        text = f"the limit of {limit} is reached; try again in {retry_after_s} s"
        super().__init__(429, envelope.body(429, text, code="rate_limit_exceeded"), retry_after_s)


def _refusal(status: int, message: str, **fields: str) -> Refused:
    return Refused(status, envelope.body(status, message, **fields))


async def _while_there(receive: Any, work: Awaitable[None], answer: _Answer) -> None:
    """Do the work, but not for a client that leaves before it has all. Raises _Gone then."""
    leaving = asyncio.ensure_future(receive())
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not answer.is_complete:
            raise _Gone
        await working
    finally:
        for task in (leaving, working):
            if not task.done():
                task.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


__all__ = ["Door", "Limited", "Router", "Send"]
