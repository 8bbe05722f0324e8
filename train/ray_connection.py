"""The way to a Ray cluster: the one that is named, or one of our own on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from ebbtide.platform import node_memory, signals
from ebbtide.platform.errors import ClusterError

logger = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 5.0


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """This process as a driver of the cluster at ``address``, ``RAY_ADDRESS``, or of a new one.

    A process that is connected already stays so. A new Ray takes the whole machine, is guarded by
    a token of its own, and ends here. Raises ClusterError if the cluster cannot be reached.
    """
    import ray

    from ebbtide.platform.ray_seam import handlers

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    options: dict[str, Any] = {}
    if address is None or address == "local":
        _give_token()
        options["include_dashboard"] = False
        logger.info("starting Ray on this machine")
        address = "local"
    else:
        _require_reachable(address)
    try:
        with handlers.left_out():
            ray.init(address=address, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises it bare where a node does not start in time
        raise ClusterError(f"{address}: cannot connect to Ray: {error}") from error
    with contextlib.ExitStack() as stack:
        if address == "local":
            node_id = ray.get_runtime_context().get_node_id()
            stack.enter_context(node_memory.owned(node_id))
        stack.callback(ray.shutdown)
        with signals.renewed():
            yield


def _require_reachable(address: str) -> None:
    """Ray itself tries for a minute before it says so."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ClusterError(
            f"{address}: write host:port of the head (from a node of the cluster), or the "
            "dashboard's http://host:port (from anywhere)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"{address}: no Ray cluster answers there ({error}); start one with "
            "'ray start --head', or leave --address and RAY_ADDRESS out to use this machine alone"
        ) from error


def _give_token() -> None:
    """A token for a Ray that starts here: by default Ray makes one and leaves it in the home.

    Once for the process, as Ray remembers it.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
