"""The Ray cluster that an endpoint runs on: a given one, or one of its own on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ebbtide.platform.errors import ClusterError, EbbtideError, ServeError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ray_seam.environment import (
    NO_LOG_OF_CALLS,
    PATIENT_FAILURE_DETECTION,
    QUIET_SERVE,
)
from ebbtide.serve import interrupts
from ebbtide.serve.capacity import Resources, shortfall

log = logging.getLogger(__name__)

T = TypeVar("T")

_REACH_TIMEOUT_S = 5.0
_NODE = re.compile(r"node:(?!__).+")
"""A resource that a node alone has."""


def local_cluster() -> LocalCluster:
    """A cluster with this machine's cores, ended when its context is left."""
    return LocalCluster(
        nodes=1,
        cpus_per_node=os.cpu_count() or 1,
        # engines that load keep every core busy
        environment={**PATIENT_FAILURE_DETECTION, **QUIET_SERVE, **NO_LOG_OF_CALLS},
    )


@contextlib.contextmanager
def connected(address: str, *, ours: bool) -> Iterator[None]:
    """This process as a driver on a cluster; a connection that is there already is used and kept.

    ``ours`` is for a cluster that this process started, which asks for no token.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    if not ours:
        _require_reachable(address)
    else:
        os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        _init(address)
        yield
    finally:
        ray.shutdown()


def _init(address: str) -> None:
    import ray

    from ebbtide.platform.ray_seam import handlers

    with interrupts.blocked(), handlers.left_out():
        try:
            ray.init(
                address, log_to_driver=False, logging_level=logging.WARNING, configure_logging=True
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"{address}: cannot connect to Ray there: {error}") from error


def _require_reachable(address: str) -> None:
    """Ray itself tries for a minute before it says so."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"{address}: cannot connect to Ray there: {error}; start it with `ray start --head`, or"
            " leave --address out to serve from this machine alone"
        ) from error


def nodes() -> list[dict[str, float]]:
    """The resources of every living node, in all, busy or not."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def is_loopback() -> bool:
    """Whether every node is known by a loopback address: all are on this machine."""
    import ray

    addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def on_head(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process on the cluster's head node; errors come back as they were."""
    import ray

    task = ray.remote(function).options(num_cpus=0, scheduling_strategy=_head())
    try:
        return ray.get(task.remote(*arguments))  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _head() -> Any:
    """The strategy that places on the head node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ebbtide.platform.ray_seam.state import head_node

    head = head_node()
    if head is None:
        raise ClusterError("the Ray cluster has no living head node")
    return NodeAffinitySchedulingStrategy(head, soft=False)


def supervised_on_head(actor: type, name: str, namespace: str, *arguments: Any) -> Any:
    """An actor on the head node that Ray starts again when it dies, until :func:`end`."""
    import ray

    return (
        ray.remote(actor)
        .options(
            name=name,
            namespace=namespace,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=16,
            scheduling_strategy=_head(),
        )
        .remote(*arguments)
    )


def where_room_is(
    bundle: Resources, actor: type, environment: dict[str, Any], *arguments: Any
) -> tuple[Any, str]:
    """An actor that takes no room, on a node that has that of ``bundle``, busy or not.

    ``environment`` is the runtime environment of its process. It ends with this process, or by
    :func:`end`. The node's id comes second. Raises ClusterError if there is none.
    """
    import ray

    from ebbtide.platform.ray_seam.state import draining_nodes

    going = draining_nodes()
    usable = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in going]
    if not usable:
        raise ClusterError("the Ray cluster has no node that stays; add one")
    roomy = (node for node in usable if not shortfall([bundle], [node["Resources"]]))
    node = next(roomy, usable[0])
    # its name as a resource: by its id, one that has just joined may be unknown to the scheduler
    name = next(key for key in node["Resources"] if _NODE.fullmatch(key))
    started = ray.remote(actor).options(
        num_cpus=0, resources={name: 0.001}, runtime_env=environment
    )
    return started.remote(*arguments), str(node["NodeID"])


def is_alive(node_id: str) -> bool:
    """Whether a node has not gone."""
    import ray

    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def end(actor: Any) -> None:
    """End an actor for good. May be called more than once."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor, no_restart=True)


def answer_of(reference: Any, what: str, timeout_s: float = 60.0) -> Any:
    """What an actor's call returned. Raises an EbbtideError as it was raised there, and for
    anything else ServeError that begins with ``what``."""
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EbbtideError):
            raise error.cause from None
        raise ServeError(f"{what}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise ServeError(f"{what}: {str(error).strip().splitlines()[-1]}") from error
