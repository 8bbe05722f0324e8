"""Ports: whether one is free, and runs of free ones."""

from __future__ import annotations

import random
import socket

from ebbtide.platform.errors import ServeError

_LOWEST, _HIGHEST = 20_000, 30_000
"""Above the ports of Ray's workers, below those that the kernel gives to clients."""


def require_free(host: str, port: int) -> None:
    """Raise ServeError if nothing can listen on the port, saying why."""
    try:
        _bind(host, port)
    except OSError as error:
        raise ServeError(
            f"http.host {host}, http.port {port}: cannot listen there: {error.strerror or error}; "
            "stop what uses the port, or choose another with --set http.port=PORT"
        ) from error


def free_run(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free on this machine."""
    for _ in range(100):
        first = random.randrange(_LOWEST, _HIGHEST - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ServeError(f"no {count} neighbouring ports between {_LOWEST} and {_HIGHEST} are free")


def _is_free(port: int) -> bool:
    try:
        _bind("", port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
