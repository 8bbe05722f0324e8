"""The start of an endpoint: checked, then its routers and workers.

Promises: what can be seen to be wrong (model, port, a cluster too small) is said before any engine
starts; :func:`start` returns when a request has gone the whole way through both roles; when it
fails, and after :meth:`Serving.stop`, nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError, CostError, ServeError
from ebbtide.platform.ledger import Alive, Finished, LedgerWriter, Started, read_ledger
from ebbtide.platform.ports import free_run
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.serve import capacity, cluster, engine_sockets, local_model, ports
from ebbtide.serve.beats import NAMESPACE
from ebbtide.serve.builder import Builder
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site, demand, num_ports, side_channel_ports
from ebbtide.serve.interrupts import Interrupts
from ebbtide.serve.keys import ApiKey
from ebbtide.serve.router_actor import RouterProcess, open_note, router_names
from ebbtide.serve.routers import Routers
from ebbtide.serve.serving import Serving
from ebbtide.serve.workers import Workers

if TYPE_CHECKING:
    from ebbtide.platform.local_cluster import LocalCluster

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SAY_EVERY_S = 10.0
_END_TIMEOUT_S = 10.0
_LEDGER_SILENT_S = 30.0
"""A ledger's writer tells at least every 10 s that it lives."""
_OF_A_TRAINING = ("events", "checkpoints")


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
    resources.enter_context(_ledger(config))
    interrupts = resources.enter_context(Interrupts())
    token = secrets.token_hex(16)
    resources.callback(engine_sockets.remove_left, token)
    try:
        own = _prepare(config, address, resources, interrupts)
        with interrupts.raising():
            _await_capacity(config, own is not None, deadline_s, clock)
        if own is None:  # one of our own can end with Serve and engines that are half started
            _require_idle_serve()
            resources.callback(_end_serve)
        first_port = free_run(2 * num_ports(config))
        side_channels = side_channel_ports(config, first_port)
        site = Site(side_channels, cluster.is_loopback(), router_names(config), token)
        workers = Workers(config, site, interrupts.check)

        def pause(seconds: float) -> None:
            with interrupts.raising():
                clock.sleep(seconds)

        def say(text: str) -> None:
            log.info("%s: %s", config.name, text)

        with Builder(
            config, site, interrupts.check
        ) as builder:  # imports vLLM while the rest starts
            actors = _start_routers(config, keys, token, resources)
            _start_serve()
            with interrupts.raising():
                builder.prepare()
            workers.scale(config.counts, builder)
        routers = Routers(config, actors)
        workers.await_ready(config.counts, routers, deadline_s, clock, pause, say)
        with interrupts.raising():
            routers.warm_up(workers.generation)
        if own is not None:
            resources.callback(_end_serve)
            for actor in actors:
                resources.callback(cluster.end, actor)
        for actor in actors:
            resources.callback(_close_books, actor)
    except BaseException:
        resources.close()
        raise
    return Serving(workers, routers, resources, interrupts, clock, first_port)


@contextlib.contextmanager
def _ledger(config: ServeConfig) -> Iterator[None]:
    """The endpoint's life in its ledger, of which the routers write the rest."""
    if config.ledger is None:
        yield
        return
    clock, storage = SystemClock(), open_storage(config.ledger)
    _require_own(storage, config.ledger, clock.time())
    with LedgerWriter(storage, name="endpoint") as writer:
        writer.write(Started(time_s=clock.time()))
        if not writer.flush():
            raise ServeError(f"{config.ledger}: the ledger cannot be written there; see above")
        try:
            yield
        finally:
            writer.write(Finished(time_s=clock.time(), status="stopped"))


def _require_own(storage: Storage, uri: str, now_s: float) -> None:
    """Raise ServeError if another one writes this ledger: what a second start ends in its books is
    everything. One that was killed is taken for alive for :data:`_LEDGER_SILENT_S`."""
    if any(next(iter(storage.child(name).list()), None) for name in _OF_A_TRAINING):
        text = "is that of a training run, whose cost would be lost; give the endpoint its own"
        raise ServeError(f"{uri}: the ledger {text}")
    try:
        records = read_ledger(storage).records
    except CostError:  # there is none
        return
    ended_s = max((each.time_s for each in records if isinstance(each, Finished)), default=0.0)
    begun_s = max((each.time_s for each in records if isinstance(each, Started)), default=0.0)
    told_s = max((each.time_s for each in records if isinstance(each, Alive | Started)), default=0)
    if begun_s > ended_s and now_s - told_s < _LEDGER_SILENT_S:
        raise ServeError(
            f"{uri}: another endpoint wrote this ledger {max(0.0, now_s - told_s):.0f} s ago; give"
            " each its own, or if that one was killed, start again"
            f" {_LEDGER_SILENT_S:.0f} s after it"
        )


def _close_books(router: Any) -> None:
    """Have a router write what it has not, before it ends."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(router.close_books.remote(), timeout=_END_TIMEOUT_S)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _prepare(
    config: ServeConfig,
    address: str | None,
    resources: contextlib.ExitStack,
    interrupts: Interrupts,
) -> LocalCluster | None:
    """Check port and model, and connect to the cluster; returns it if it is our own."""
    if address is not None:
        resources.enter_context(cluster.connected(address, ours=False))
        with interrupts.raising():
            cluster.on_head(ports.require_free, config.http.host, config.http.port)
            cluster.on_head(local_model.check, config)
        return None
    own = cluster.local_cluster()
    resources.callback(own.stop)
    with interrupts.raising():
        ports.require_free(config.http.host, config.http.port)
        local_model.check(config)
        _require_capacity(config, [{"CPU": float(os.cpu_count() or 1), "GPU": math.inf}])
        own.start()
    resources.enter_context(cluster.connected(own.address, ours=True))
    return own


def _require_capacity(config: ServeConfig, nodes: Sequence[capacity.Resources]) -> None:
    """Raise ClusterError that says what is needed and what is there."""
    if short := capacity.shortfall(demand(config, config.counts), nodes):
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
    from ebbtide.platform.ray_seam.serve import note

    note(open_note(config), "1")
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


def _start_serve() -> None:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _end_serve()  # one that serves nothing: it would keep its own options
    serve.start(proxy_location="Disabled")


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
