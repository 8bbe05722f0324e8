"""The way into a local cluster from another process: a socket in its folder that adds nodes.

Nodes end with the thread that started them, so only the process that owns the cluster can add one
that stays. One request is served at a time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path

from ebbtide.platform.errors import ClusterError, EbbtideError

_NAME = "door"
_TIMEOUT_S = 180.0


class _Server(socketserver.UnixStreamServer):
    add_node: Callable[[], str]


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            reply = {"name": self.server.add_node()}
        except EbbtideError as error:
            reply = {"error": str(error)}
        with contextlib.suppress(OSError):  # who asked has gone
            self.wfile.write(json.dumps(reply).encode())


class Door:
    """Open from its making until :meth:`close`. ``add_node`` returns the new node's name."""

    def __init__(self, folder: Path, add_node: Callable[[], str]) -> None:
        self._server = _Server(str(folder / _NAME), _Handler)
        self._server.add_node = add_node
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="ebbtide-door", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Waits for a node that is being added."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ask_for_node(folder: Path) -> str:
    """Have the owner of the cluster in ``folder`` add a node; its name. Raises ClusterError."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_TIMEOUT_S)
        try:
            door.connect(str(folder / _NAME))
            reply = json.loads(b"".join(iter(lambda: door.recv(4096), b"")))
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{folder}: the process that started this local cluster adds no node: {error}"
            ) from error
    if "error" in reply:
        raise ClusterError(reply["error"])
    return str(reply["name"])
