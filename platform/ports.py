"""Ports of this machine: whether one is free, and free ones.

Nothing is reserved: whoever asks should listen soon, and be ready to find a port taken after all.
"""

from __future__ import annotations

import contextlib
import random
import socket

from ebbtide.platform.errors import ClusterError

_LOWEST, _HIGHEST = 20_000, 30_000
"""Above the ports of Ray's workers, below those that the kernel gives to clients."""


def free_ports(count: int, *, also_above: int = 0) -> list[int]:
    """Different ports that are free on loopback, and free as well ``also_above`` higher."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            upper = held.enter_context(socket.socket())
            upper.bind(("127.0.0.1", 0))
            port = int(upper.getsockname()[1]) - also_above
            if also_above:
                lower = held.enter_context(socket.socket())
                try:
                    lower.bind(("127.0.0.1", port))
                except OSError:
                    continue
            ports.append(port)
        return ports


def free_run(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free. Raises ClusterError."""
    for _ in range(100):
        first = random.randrange(_LOWEST, _HIGHEST - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ClusterError(f"no {count} neighbouring ports between {_LOWEST} and {_HIGHEST} are free")


def try_to_listen(host: str, port: int) -> None:
    """Take the port and leave it. Raises OSError, saying why nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _is_free(port: int) -> bool:
    try:
        try_to_listen("", port)
    except OSError:
        return False
    return True
