"""A request's way through the workers: prefill, decode, and on to another worker if one is lost.

The only hop between a client's socket and an engine. Promises: chunks go on as they come; a prompt
whose prefill worker fails is computed by the decode worker; a stream whose worker is lost goes on
at another one with the same model, and where that cannot be it ends in an error event, never as if
it were complete; what an answer cost is told even if its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from ebbtide.serve import envelope, prefixes
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import Fleet, Worker
from ebbtide.serve.router_metrics import RouterMetrics
from ebbtide.serve.scaling import Known
from ebbtide.serve.split import Load, Settings, prefill_where
from ebbtide.serve.stages import Cost, StageName
from ebbtide.serve.stream import PATHS, Kind, Stream
from ebbtide.serve.worker_client import Leg, Lost, Refused, WorkerClient, fault

log = logging.getLogger(__name__)

Json = dict[str, Any]
Send = Callable[[int, bytes, bool], Awaitable[None]]
"""Status, bytes, and whether more follow. The first call decides the status."""

_DONE = b"data: [DONE]\n\n"
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_THE_ANSWER = {"max_completion_tokens", "stream", "stream_options", "min_tokens", "logprobs"} | {
    *("top_logprobs", "stop", "include_stop_str_in_output", "echo")
}
"""Fields that a prefill worker, which computes one token to be thrown away, does not need."""
_GIVEN_UP = ("abort", "error")
_LOST = envelope.body(503, "the answer is incomplete: its worker was lost", code="worker_lost")
_MOST_LOSSES = 3
"""So many workers a request may lose without a further token: one that ends engines ends there."""
_LOOK_S = 0.25
_RETRY_AFTER_S = 5
_NEW = 0.2
"""Weight of the latest prompt in the rate at which prompts are computed."""


@dataclass
class Relay:
    """Leads requests to the workers of a fleet. One per router, in one event loop."""

    fleet: Fleet
    settings: Settings
    metrics: RouterMetrics
    client: WorkerClient
    num_waiting: int = 0
    prefill_tokens_per_s: float = 0.0
    _ratio: prefixes.Ratio = field(default_factory=prefixes.Ratio)
    _gaps: tuple[float, int] = (0.0, 0)

    def known(self, now_s: float) -> Known:
        """What the number of workers is decided by; the gap is that since this was asked before."""
        total_s, number = self.metrics.gaps()
        before_s, num_before = self._gaps
        self._gaps = (total_s, number)
        workers: dict[Role, list[Worker]] = {
            role: self.fleet.ready(role, now_s) for role in ("prefill", "decode")
        }
        loads = [each.last.load for each in workers["decode"]]
        is_idle = not self.client.legs and not self.num_waiting
        return Known(
            ready={role: len(found) for role, found in workers.items()},
            num_queued_tokens=sum(each.num_queued_tokens for each in workers["prefill"]),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            num_sequences=sum(each.num_running + each.num_waiting for each in loads),
            num_engine_waiting=sum(each.num_waiting for each in loads),
            kv_usage=sum(each.kv_usage for each in loads) / len(loads) if loads else 0.0,
            gap_s=(total_s - before_s) / (number - num_before) if number > num_before else 0.0,
            num_waiting=self.num_waiting,
            idle_s=now_s - self.client.last_s if is_idle else 0.0,
        )

    def num_at_work(self, generation: int) -> int:
        """Requests that workers of a generation have begun."""
        return sum(leg.worker.last.generation == generation for leg in self.client.legs)

    async def _decode_worker(
        self, keys: list[int], tried: set[str], bound: int | None, *, has_begun: bool
    ) -> Worker | None:
        """The next worker to be asked, of the generation that the request is bound to if it is;
        its address is in ``tried`` from now on."""
        worker = self.fleet.for_decode(keys, time.monotonic(), tried, bound)
        if worker is None and not has_begun and (self.settings.scales or not tried):
            worker = await self._first_worker(keys, tried, bound)
        if worker is not None:
            tried.add(worker.last.url)
        return worker

    async def _first_worker(
        self, keys: list[int], tried: set[str], bound: int | None
    ) -> Worker | None:
        """The first worker that comes; None after too long a time, or if too many wait already."""
        if self.num_waiting >= self.settings.max_waiting:
            return None
        deadline_s = time.monotonic() + self.settings.wait_s
        self.num_waiting += 1
        self.metrics.waiting.inc()
        try:
            while (worker := self.fleet.for_decode(keys, time.monotonic(), tried, bound)) is None:
                if time.monotonic() > deadline_s:
                    return None
                await asyncio.sleep(_LOOK_S)
            return worker
        finally:
            self.num_waiting -= 1
            self.metrics.waiting.dec()

    async def _await_worker(self, keys: list[int], generation: int | None = None) -> None:
        """Have a request wait while there is no worker at all. Raises Refused."""
        worker = self.fleet.for_decode(keys, time.monotonic(), (), generation)
        if worker is None and await self._first_worker(keys, set(), generation) is None:
            raise self._no_worker()

    def _no_worker(self) -> Refused:
        now_s = time.monotonic()
        for worker in self.fleet.workers():
            log.warning("no worker can answer: %s", worker.describe(now_s))
        body = envelope.body(503, "no worker can answer; try again in a moment")
        return Refused(503, body, retry_after_s=_RETRY_AFTER_S)

    def _learn_rate(self, num_tokens: int, took_s: float) -> None:
        """A prefill worker has computed a prompt and what was queued before it."""
        rate = num_tokens / max(took_s, 1e-3)
        before = self.prefill_tokens_per_s or rate
        self.prefill_tokens_per_s = before + _NEW * (rate - before)

    async def whole(
        self, kind: Kind, request: Json, send: Send, cost: Cost, generation: int | None = None
    ) -> None:
        """Answer a request that is not streamed, by workers of a generation if one is given.

        Raises Refused.
        """
        parts = prefixes.units(request)
        keys, tried, lost = prefixes.keys(parts), set[str](), list[Lost]()
        await self._await_worker(keys, generation)
        body, bound = await self._prefilled(kind, dict(request), parts, keys, cost, generation)
        while (
            len(lost) < _MOST_LOSSES
            and (worker := await self._decode_worker(keys, tried, bound, has_begun=False))
            is not None
        ):
            try:
                with self.client.at(worker, keys, cost.headers) as leg:
                    leg.is_bound, asked_s = bound is not None, time.monotonic()
                    answer = await self.client.post(leg, PATHS[kind], body)
                cost.last_s = time.monotonic()
                cost.passed("decode", worker, asked_s, cost.last_s)
            except Refused:
                await self._release(worker, body)
                raise
            except Lost as error:
                lost.append(error)
                _let_try_again(worker, body, tried)
                body, bound = dict(request), generation  # what a prefill worker has may be gone
                continue
            except asyncio.CancelledError:
                cost.num_prompt_tokens = self._ratio.tokens(parts, len(parts))
                raise
            usage = answer.get("usage") or {}
            cost.num_prompt_tokens = usage.get("prompt_tokens") or 0
            cost.num_output_tokens = usage.get("completion_tokens") or 0
            if "kv_transfer_params" in answer:
                answer["kv_transfer_params"] = None
            return await send(200, to_json(answer), False)
        raise self._no_worker() from (lost[-1] if lost else None)

    async def stream(self, kind: Kind, request: Json, send: Send, cost: Cost) -> None:
        """Answer a request as a stream of events. Raises Refused before anything is sent."""
        cost.last_s = time.monotonic()
        parts = prefixes.units(request)
        keys, tried = prefixes.keys(parts), set[str]()
        stream = Stream(kind, request)
        path, body = PATHS[kind], stream.first_request()
        losses = most_tokens = unknown = 0
        await self._await_worker(keys)
        body, bound = await self._prefilled(kind, body, parts, keys, cost)
        try:
            while (
                losses < _MOST_LOSSES
                and (
                    worker := await self._decode_worker(
                        keys, tried, bound, has_begun=stream.has_begun
                    )
                )
                is not None
            ):
                stream.max_model_len = worker.last.max_model_len
                try:
                    with self.client.at(worker, keys, cost.headers) as leg:
                        leg.is_bound = bound is not None
                        return await self._follow(leg, path, body, stream, send, cost)
                except Refused:
                    await self._release(worker, body)
                    raise
                except Lost as lost:
                    if stream.finish_reason is not None:
                        return await self._end(stream, send)
                    if not stream.can_move:
                        log.warning("a stream cannot go on: %s", lost)
                        break
                    _let_try_again(worker, body, tried)
                    losses = 1 if stream.num_tokens > most_tokens else losses + 1
                    most_tokens = max(most_tokens, stream.num_tokens)
                    self.metrics.moves.inc()
                    bound = worker.last.generation if stream.has_begun else None
                    path, body = stream.move()
            if not stream.has_begun:
                raise self._no_worker()
            self.metrics.lost.inc()
            await send(200, _event(_LOST), False)
        except asyncio.CancelledError:
            unknown = self._ratio.tokens(parts, len(parts))
            raise
        finally:
            cost.num_prompt_tokens, cost.num_output_tokens = (
                len(stream.prompt_ids) or unknown,
                stream.num_tokens,
            )
            if cost.first_s:
                self.metrics.decode.observe(cost.last_s - cost.first_s)
            if stream.prompt_ids:
                self._ratio.learn(parts, len(stream.prompt_ids))

    async def _follow(
        self, leg: Leg, path: str, body: Json, stream: Stream, send: Send, cost: Cost
    ) -> None:
        """Send a worker's chunks on until it has said all. Raises Lost, Refused."""
        timed = self.metrics.gap if stream.has_begun else self.metrics.ttft
        is_done, leg.has_moved = False, stream.num_moves > 0
        began_s = asked_s = time.monotonic()
        where = "remote" if body.get("kv_transfer_params") else "local"
        try:
            async with contextlib.aclosing(self.client.events(leg, path, body)) as events:
                async for event in events:
                    if event == b"[DONE]":
                        await send(200, _DONE, False)
                        is_done = True  # and read to the end, for the connection to be of use again
                        continue
                    shown = self._shown(from_json(event), stream)
                    leg.can_move = stream.can_move
                    cost.num_prompt_tokens = len(stream.prompt_ids)  # what it had if all ends now
                    cost.num_output_tokens = stream.num_tokens
                    now_s = leg.worker.output_s = time.monotonic()
                    if not leg.has_begun:
                        leg.has_begun = True
                        self.metrics.first_token.labels(where).observe(now_s - asked_s)
                        name: StageName = "transfer" if where == "remote" else "prefill"
                        cost.passed(name, leg.worker, asked_s, now_s)
                        began_s = now_s
                    if shown is not None:
                        leg.is_sending = True
                        await send(200, _event(shown), True)
                        leg.is_sending, leg.worker.output_s = False, time.monotonic()
                        timed.observe(now_s - cost.last_s)
                        cost.first_s = cost.first_s or now_s
                        cost.last_s, timed = now_s, self.metrics.gap
                    if stream.is_cut:
                        return await self._end(stream, send)
        except Lost:
            if not is_done:
                raise
        finally:
            if leg.has_begun:
                cost.passed("decode", leg.worker, began_s, cost.last_s)
        if not is_done:
            raise Lost("ended too early")

    def _shown(self, chunk: Json, stream: Stream) -> Json | None:
        """A worker's chunk as the client sees it, if it does. Raises Lost, Refused."""
        if "error" in chunk:
            raise fault(chunk["error"], has_begun=stream.has_begun)
        if any(each.get("finish_reason") in _GIVEN_UP for each in chunk["choices"]):
            raise Lost("given up by its worker")
        return stream.take(chunk)

    async def _end(self, stream: Stream, send: Send) -> None:
        """What a stream's worker has not said any more after the text was complete."""
        for chunk in stream.owed():
            await send(200, _event(chunk), True)
        await send(200, _DONE, False)

    async def _release(self, worker: Worker, body: Json) -> None:
        """A decode worker refused what a prefill worker had computed: that keeps it no longer.

        One that is lost may be reading just now, so there the lease has to end by itself.
        """
        if params := body.get("kv_transfer_params"):
            await self.client.release(worker, params)

    async def _prefilled(
        self,
        kind: Kind,
        body: Json,
        parts: str | list[int],
        keys: list[int],
        cost: Cost,
        generation: int | None = None,
    ) -> tuple[Json, int | None]:
        """The body for the decode worker, after the prompt was computed elsewhere if that pays, and
        the generation that it has to be of, if any: that of the prefill worker, or the given one.

        Raises Refused when a prefill worker finds fault with the request.
        """
        now_s = time.monotonic()
        decode = self.fleet.for_decode(keys, now_s, (), generation)
        if decode is None or decode.last.role != "decode":
            return body, generation
        prefill = self.fleet.for_prefill(keys, now_s, decode.last.generation)
        if prefill is None:
            return body, generation
        num_new = self._ratio.tokens(parts, max(0, len(parts) - decode.prefixes.known(keys)))
        load = Load(num_new, prefill.num_queued_tokens, decode.num_requests)
        where = prefill_where(body, load, self.settings.mode, self.settings.split_min_tokens)
        self.metrics.count_prefill(where)
        if where == "local":
            return body, generation
        asked = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
        asked |= {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": _REMOTE_DECODE}
        prefill.num_queued_tokens += num_new
        num_queued, asked_s = prefill.num_queued_tokens, time.monotonic()
        try:
            with (
                self.client.at(prefill, keys, cost.headers) as leg,
                self.metrics.prefill.time(),
            ):
                answer = await self.client.post(leg, PATHS[kind], asked)
            cost.passed("prefill", prefill, now_s, time.monotonic())
            self._learn_rate(num_queued, time.monotonic() - asked_s)
        except Lost as lost:
            log.warning("a prompt is computed by a decode worker: %s", lost)
            return body, generation
        finally:
            prefill.num_queued_tokens -= num_new
        bound = prefill.last.generation
        if self.fleet.for_decode(keys, time.monotonic(), (), bound) is None:
            return body, generation  # they have ended meanwhile; what they computed is of no use
        ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
        if kind == "completion" and ids and not body.get("echo"):
            body = {**body, "prompt": ids}  # which spares the second worker the tokenizer
        body = {**body, "kv_transfer_params": answer.get("kv_transfer_params")}
        return body, bound


def _let_try_again(worker: Worker, body: Json, tried: set[str]) -> None:
    """A worker that may just have missed what a dead prefill worker had can compute it itself."""
    if body.get("kv_transfer_params"):
        tried.discard(worker.last.url)


def _event(value: Json) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
