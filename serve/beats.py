"""What a worker says of itself: every second or two to the routers, and to Ray Serve when it asks.

An engine is asked for a sign of life as often, as a stuck one keeps its sockets open and its
replica well. The question does not go on to the engine's workers: one that does not compute keeps
the engine from answering while there is work, and is not to be woken while there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import prometheus_client

from ebbtide.platform.errors import ServeError
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import BEAT_S, GIVEN_UP_S, IDLE_BEAT_S, Beat, EngineLoad

log = logging.getLogger(__name__)

NAMESPACE = "ebbtide-serve"
"""Of the routers' actors."""
_LAST_WORD_S = 1.0
_COUNTS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_queue_time_seconds_count",
)


class Pulse:
    """The beats of one engine, until it leaves. All calls from one event loop."""

    def __init__(
        self, client: Any, routers: Sequence[str], role: Role, url: str, generation: int = 1
    ) -> None:
        self._client, self._router_names = client, routers
        self._role: Role = role
        self._generation = generation
        self._url, self._id = url, f"{role}-{secrets.token_hex(4)}"
        self._asked_s: float | None = None  # of a question without an answer so far
        self._is_leaving = False
        self._tasks: list[asyncio.Task[None]] = []
        self._routers: list[Any] = []
        self._load, self._next_s = EngineLoad(), BEAT_S

    def start(self) -> None:
        """Beat until :meth:`leave` returns."""
        self._tasks = [asyncio.create_task(each) for each in (self._probe(), self._beat())]

    async def leave(self, idle: Awaitable[None], drain_s: float) -> None:
        """Get no new requests from now on, end what is begun until ``idle``, for so long at most,
        and say nothing more."""
        self._is_leaving = True
        self._tell()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle, drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if told := self._tell():
            await asyncio.wait(told, timeout=_LAST_WORD_S)

    def check(self) -> None:
        """Raise ServeError if the engine has been silent for so long that it has to be replaced,
        or if nothing is told of it any more."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise ServeError(f"the worker cannot tell that it lives: {error!r}") from error
        if (silent_s := self._silent_s()) > GIVEN_UP_S:
            raise ServeError(f"the engine has not answered for {silent_s:.0f} s")

    def _silent_s(self) -> float:
        if self._client.errored:
            return math.inf
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    async def _probe(self) -> None:
        while not self._client.errored:
            self._asked_s = time.monotonic()
            await self._client.is_sleeping()
            self._asked_s = None
            await asyncio.sleep(self._next_s)

    async def _beat(self) -> None:
        import ray

        names = self._router_names
        self._routers = [await asyncio.to_thread(ray.get_actor, name, NAMESPACE) for name in names]
        while True:
            self._tell()
            await asyncio.sleep(self._next_s)

    def _tell(self) -> list[Any]:
        """Say to the routers how it is; returns what their answers will be."""
        load, silent_s = engine_load(), self._silent_s()
        self._next_s = next_beat_s(self._load, load, silent_s)
        self._load = load
        beat = Beat(
            self._id,
            self._role,
            self._url,
            int(self._client.model_config.max_model_len),
            silent_s,
            self._is_leaving,
            load,
            self._generation,
            self._next_s,
        )
        return [router.beat.remote(beat) for router in self._routers]


def next_beat_s(before: EngineLoad, now: EngineLoad, silent_s: float) -> float:
    """When a worker is to be heard of again: later if its engine rests, and answers."""
    is_at_rest = now == before and not (now.num_running or now.num_waiting or now.kv_usage)
    return IDLE_BEAT_S if is_at_rest and silent_s < BEAT_S else BEAT_S


def engine_load(
    registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
) -> EngineLoad:
    """Of the engine whose client is in this process, as vLLM counts it; zeros before it has."""
    found = dict.fromkeys(_COUNTS, 0.0)
    for metric in registry.restricted_registry(_COUNTS).collect():
        for sample in metric.samples:
            found[sample.name] += sample.value
    running, waiting, usage, queue_s, ended = found.values()
    return EngineLoad(int(running), int(waiting), usage, queue_s, int(ended))
