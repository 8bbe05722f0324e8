"""Replicas in Ray Serve without an engine: stand-ins that beat, drain and end as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import prometheus_client
from ray import serve

from ebbtide.platform.errors import ConfigError
from ebbtide.serve.beats import Pulse
from ebbtide.serve.config import Role, ServeConfig
from ebbtide.serve.engine import Site, application_names
from ebbtide.serve.engine_door import EngineDoor
from ebbtide.serve.http_server import HttpServer
from tests.serve import stand_in
from tests.serve.stand_in import StandIn

DRAIN_S = 1.0
UNKNOWN = "no_option"
_FULL = 3
"""Requests of which a worker's blocks are full."""


class _App(StandIn):
    """Believes the door that a router asks, and counts requests as vLLM does."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        _RUNNING.set(self.num_open)
        _USAGE.set(min(1.0, self.num_open / _FULL))
        try:
            await super()._generate(path, request, send)
        finally:
            _RUNNING.set(self.num_open - 1)
            _USAGE.set(min(1.0, (self.num_open - 1) / _FULL))


_RUNNING: Any = None
_USAGE: Any = None


class LightServer:
    """What is deployed."""

    def __init__(self, role: Role, routers: tuple[str, ...], token: str, generation: int) -> None:
        self._arguments: Any = (role, routers, token, generation)
        self._starting = asyncio.get_event_loop().create_task(self._start())

    async def _start(self) -> None:
        global _RUNNING, _USAGE
        role, routers, token, generation = self._arguments
        stand_in.TOKEN = token
        _RUNNING = prometheus_client.Gauge("vllm:num_requests_running", "")
        _USAGE = prometheus_client.Gauge("vllm:kv_cache_usage_perc", "")

        async def release(params: dict[str, Any]) -> None:
            return None

        self._door = EngineDoor(_App(gap_s=0.02), token, release, bool)
        self._http = HttpServer(self._door, "127.0.0.1")
        await self._http.start()

        async def is_sleeping() -> bool:
            return False

        engine = SimpleNamespace(
            errored=False,
            is_sleeping=is_sleeping,
            model_config=SimpleNamespace(max_model_len=4096),
        )
        url = f"http://127.0.0.1:{self._http.port}"
        self._pulse = Pulse(engine, routers, role, url, generation)
        self._pulse.start()

    async def check_health(self) -> None:
        await self._starting
        self._pulse.check()

    async def __del__(self) -> None:
        await self._starting
        await self._pulse.leave(self._door.idle(), DRAIN_S)
        await self._http.stop()


def check_options(options: Iterable[str]) -> None:
    """All are known but one."""
    if UNKNOWN in options:
        raise ConfigError(f"engine.{UNKNOWN} is not an option")


def register_connectors() -> None:
    """There are none."""


def build(
    config: ServeConfig,
    site: Site,
    counts: Mapping[Role, int],
    environments: Mapping[Role, dict[str, Any]],
) -> dict[str, Any]:
    """In place of ``ebbtide.serve.app.build``."""
    names = application_names(config, site.generation)
    return {
        names[role]: serve.deployment(
            LightServer,
            name=f"{role}:{config.name}",
            num_replicas=number,
            graceful_shutdown_timeout_s=20,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1,
            ray_actor_options={"num_cpus": 1},
        ).bind(role, site.routers, site.token, site.generation)
        for role, number in counts.items()
    }
