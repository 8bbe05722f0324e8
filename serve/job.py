"""An endpoint's life: checked, started, watched and stopped.

Promises: what can be seen to be wrong (model, port, a cluster too small) is said before any engine
starts; :func:`start` returns when a request has gone the whole way through both roles; when it
fails, and after :meth:`Serving.stop`, nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import math
import os
import secrets
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError, ServeError
from ebbtide.platform.ports import free_run
from ebbtide.serve import capacity, cluster, local_model, ports, split, startup
from ebbtide.serve.beats import NAMESPACE
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import (
    Site,
    application_names,
    demand,
    num_ports,
    side_channel_ports,
)
from ebbtide.serve.interrupts import Interrupts
from ebbtide.serve.keys import ApiKey
from ebbtide.serve.router_actor import RouterProcess, router_names

if TYPE_CHECKING:
    from ebbtide.platform.local_cluster import LocalCluster

log = logging.getLogger(__name__)

_POLL_S = 1.0
_WATCH_S = 2.0
_ADVISE_S = 60.0
_BEAT_S = 0.2
_SAY_EVERY_S = 10.0
_END_TIMEOUT_S = 10.0
_WARM_UP_TIMEOUT_S = 60.0


class Serving:
    """A running endpoint; a context manager that stops it."""

    def __init__(
        self,
        config: ServeConfig,
        resources: contextlib.ExitStack,
        interrupts: Interrupts,
        clock: Clock,
        router: Any = None,
    ) -> None:
        self.endpoint, self.model_name = config.endpoint, config.model_name
        self._config, self._resources = config, resources
        self._interrupts, self._clock, self._router = interrupts, clock, router

    def __enter__(self) -> Serving:
        self._interrupts.may_raise = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the endpoint and all that was started for it. May be called more than once."""
        self._interrupts.may_raise = False
        self._resources.close()

    def wait(self) -> None:
        """Block for as long as the endpoint lives. Raises ServeError when it ends by itself,
        KeyboardInterrupt on SIGINT and SystemExit on SIGTERM.
        """
        self._interrupts.may_raise = False
        was, looked_s = "running", self._clock.monotonic()
        advised_s = looked_s
        while True:
            self._interrupts.check()
            self._clock.sleep(_BEAT_S)
            if self._clock.monotonic() - looked_s >= _WATCH_S:
                now, looked_s = _progress(self._config), self._clock.monotonic()
                if now.state != was:
                    log.warning("%s: %s", self._config.name, now.text)
                was = now.state
            if self._clock.monotonic() - advised_s >= _ADVISE_S:
                advised_s = self._clock.monotonic()
                self._advise()

    def _advise(self) -> None:
        """Say once if the workers would be better put to another use."""
        import ray

        if self._router is None or self._config.mode == "colocated":
            return
        with contextlib.suppress(ray.exceptions.RayError):
            led = ray.get(self._router.prefills.remote(), timeout=_WATCH_S)
            if advice := split.better_colocated(led["local"], led["remote"]):
                log.info("%s: %s", self._config.name, advice)
                self._router = None


def start(
    config: ServeConfig,
    address: str | None = None,
    clock: Clock | None = None,
    more_keys: Sequence[ApiKey] = (),
) -> Serving:
    """Start an endpoint on the Ray cluster at ``address``, or on one of its own on this machine.

    ``more_keys`` are added to those of the configuration.

    Raises ServeError or ClusterError, with nothing left behind; so too KeyboardInterrupt on SIGINT
    and SystemExit on SIGTERM.
    """
    clock = clock or SystemClock()
    deadline_s = clock.monotonic() + config.start_timeout_s
    if importlib.util.find_spec("vllm") is None:
        raise ServeError('vLLM is not installed; pip install "ebbtide[cpu]" or "ebbtide[gpu]"')
    config = local_model.absolute(config)
    keys = [*config.http.keys, *more_keys]
    if not keys and not is_loopback(config.http.host):
        log.warning(
            "http.host %s: everybody who can reach it may ask, as there are no API keys",
            config.http.host,
        )
    resources = contextlib.ExitStack()
    interrupts = resources.enter_context(Interrupts())
    try:
        own = _prepare(config, address, resources, interrupts)
        with interrupts.raising():
            _await_capacity(config, own is not None, deadline_s, clock)
        if own is None:  # one of our own can end with Serve and engines that are half started
            _require_idle_serve()
            resources.callback(_end_serve)
        token = secrets.token_hex(16)
        routers = _start_routers(config, keys, token, resources)
        _deploy(config, token)
        _await_running(config, routers[0], deadline_s, clock, interrupts)
        with interrupts.raising():
            _warm_up(config, routers[0])
        if own is not None:
            resources.callback(_end_serve)
            for router in routers:
                resources.callback(cluster.end, router)
    except BaseException:
        resources.close()
        raise
    return Serving(config, resources, interrupts, clock, routers[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _builder() -> ModuleType:
    """The module that builds the application; it imports vLLM, which takes many seconds."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return importlib.import_module("ebbtide.serve.app")


def _prepare(
    config: ServeConfig,
    address: str | None,
    resources: contextlib.ExitStack,
    interrupts: Interrupts,
) -> LocalCluster | None:
    """Check port, model and options, and connect to the cluster; returns it if it is our own."""
    if address is not None:
        resources.enter_context(cluster.connected(address, ours=False))
        with interrupts.raising():
            cluster.on_head(ports.require_free, config.http.host, config.http.port)
            cluster.on_head(local_model.check, config)
            _builder().check_options(config.engine)
        return None
    own = cluster.local_cluster()
    resources.callback(own.stop)
    with interrupts.raising():
        ports.require_free(config.http.host, config.http.port)
        local_model.check(config)
        _require_capacity(config, [{"CPU": float(os.cpu_count() or 1), "GPU": math.inf}])
        _builder().check_options(config.engine)
        own.start()
    resources.enter_context(cluster.connected(own.address, ours=True))
    return own


def _require_capacity(config: ServeConfig, nodes: Sequence[capacity.Resources]) -> None:
    """Raise ClusterError that says what is needed and what is there."""
    if short := capacity.shortfall(demand(config), nodes):
        raise ClusterError(
            f"{config.name}: the Ray cluster is too small: {short}; add nodes, or lower the roles'"
            " replicas, cpus or gpus"
        )


def _await_capacity(config: ServeConfig, is_own: bool, deadline_s: float, clock: Clock) -> None:
    """Wait for nodes that can hold every replica; a cluster of our own will not grow."""
    said_s = -math.inf
    while True:
        try:
            return _require_capacity(config, cluster.nodes())
        except ClusterError as error:
            if is_own or clock.monotonic() > deadline_s:
                raise
            if clock.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = clock.monotonic()
                log.warning("%s; waiting %.0f s for more", error, deadline_s - said_s)
        clock.sleep(_POLL_S)


def _start_routers(
    config: ServeConfig, keys: Sequence[ApiKey], token: str, resources: contextlib.ExitStack
) -> list[Any]:
    """The actor that listens, and its spare; they end with ``resources``, the spare first."""
    actors: list[Any] = []
    for name in router_names(config):
        actor = cluster.supervised_on_head(
            RouterProcess, name, NAMESPACE, config, list(keys), token
        )
        resources.callback(cluster.end, actor)
        what = f"{config.name}: the router did not start"
        listens = cluster.answer_of(actor.listens.remote(), what)
        if not actors and not listens:
            raise ServeError(f"{what}: port {config.http.port} is in use")
        actors.append(actor)
    return actors


def _deploy(config: ServeConfig, token: str) -> None:
    """Hand the workers to Ray Serve, and start that."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    first_port = free_run(num_ports(config))
    ports_of = side_channel_ports(config, first_port)
    site = Site(ports_of, cluster.is_loopback(), router_names(config), token)
    applications = _builder().build(config, site)
    _end_serve()  # one that serves nothing: it would keep its own options
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [serve.RunTarget(app, name=name, route_prefix=None) for name, app in applications.items()],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _require_idle_serve() -> None:
    """Raise ServeError if Ray Serve serves anything already; it would end with our endpoint."""
    from ray import serve

    if others := serve.status().applications:
        raise ServeError(
            f"Ray Serve on this cluster already serves {', '.join(others)}; stop that first, or use"
            " another cluster"
        )


def _end_serve() -> None:
    from ebbtide.platform.ray_seam.serve import end_serve

    end_serve(_END_TIMEOUT_S)


def _progress(config: ServeConfig) -> startup.Progress:
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        found = serve.status().applications
    except (ray.exceptions.RayError, RayServeException) as error:
        raise ServeError(f"{config.name}: Ray Serve does not answer any more: {error}") from error
    names = application_names(config).values()
    return startup.together([startup.progress(found.get(name)) for name in names])


def _await_running(
    config: ServeConfig, router: Any, deadline_s: float, clock: Clock, interrupts: Interrupts
) -> None:
    """Until every replica runs, and the router has heard of all."""
    began_s, said_s = clock.monotonic(), clock.monotonic()
    while True:
        now = _progress(config)
        if now.state == "running" and _all_heard(config, router):
            return
        if now.state == "failed":
            raise ServeError(f"{config.name} could not be started: {now.text}")
        if clock.monotonic() > deadline_s:
            raise ServeError(
                f"{config.name} is not up after start_timeout_s ({config.start_timeout_s:g} s): "
                f"{now.text}"
            )
        if clock.monotonic() - said_s >= _SAY_EVERY_S:
            said_s = clock.monotonic()
            log.info("%s: starting for %.0f s: %s", config.name, said_s - began_s, now.text)
        with interrupts.raising():
            clock.sleep(_BEAT_S if now.state == "running" else _POLL_S)


def _all_heard(config: ServeConfig, router: Any) -> bool:
    ready = cluster.answer_of(router.ready.remote(), f"{config.name}: the router does not answer")
    return all(ready[role] >= own.replicas for role, own in config.roles.items())


def _warm_up(config: ServeConfig, router: Any) -> None:
    """Requests through all roles: they make their connections, and show that they work."""
    cluster.answer_of(
        router.warm_up.remote(), f"{config.name}: the first request failed", _WARM_UP_TIMEOUT_S
    )
