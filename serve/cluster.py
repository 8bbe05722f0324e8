"""The Ray cluster that an endpoint runs on: a given one, or one of its own on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ray_seam.environment import PATIENT_FAILURE_DETECTION
from ebbtide.serve import interrupts

log = logging.getLogger(__name__)

T = TypeVar("T")

_REACH_TIMEOUT_S = 5.0


def local_cluster() -> LocalCluster:
    """A cluster with this machine's cores, ended when its context is left."""
    return LocalCluster(
        nodes=1,
        cpus_per_node=os.cpu_count() or 1,
        environment=PATIENT_FAILURE_DETECTION,  # engines that load keep every core busy
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
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ebbtide.platform.ray_seam.state import head_node

    head = head_node()
    if head is None:
        raise ClusterError("the Ray cluster has no living head node")
    task = ray.remote(function).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False)
    )
    try:
        return ray.get(task.remote(*arguments))  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
