"""A node's fork server: imports once what workers need, and forks a worker from that when asked.

Promises: a fork is only made while this process has one thread and no accelerator's device open,
since what runs on others does not live through a fork; the clients are told the reason else.
Clients (:mod:`ebbtide.platform.ray_seam.fork_client`) are of the same user. The server ends with
the node's raylet, and when it has had no worker for a while.

``python -m ebbtide.platform.ray_seam.fork_server NAME RAYLET READY``: the name of an abstract
socket, the raylet's process number, a descriptor that is closed once the server listens.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ebbtide.platform.ray_seam.fork_client import MODULES, STANDARD_STREAMS

logger = logging.getLogger(__name__)

_IDLE_S = 30.0
_LOOK_S = 1.0
_REQUEST_S = 5.0
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_HARMLESS_THREADS = ("jemalloc_bg_thd",)
"""Threads of libraries that see to forks: PyArrow's allocator stops its own and goes on after."""


@dataclass
class Request:
    """A worker to fork: its command line, environment and folder, and its client.

    ``client`` is the process that Ray takes for the worker; the connection is open for as long as
    both live.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    client: int
    connection: socket.socket
    streams: list[int]


def end_threads_that_see_to_forks() -> None:
    """Fork once for nothing: a library such as OpenBLAS ends its threads before a fork, and starts
    them when it needs them again."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def why_not() -> str:
    """What makes a fork of this process unsafe; empty if nothing does."""
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if int(task.name) != os.getpid() and name not in _HARMLESS_THREADS:
            return f"the imported modules have started a thread, {name}"
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (path := os.readlink(entry.path)).startswith(_ACCELERATORS):
                return f"the imported modules have opened {path}"
    return ""


def receive(connection: socket.socket) -> Request | None:
    """A client's request; None if it is not of this user, has gone, or says something else."""
    connection.settimeout(_REQUEST_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] != os.getuid():
        return None
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(connection, 4, len(STANDARD_STREAMS))
        with connection.makefile("rb") as stream:
            body = stream.read(int.from_bytes(head, "big"))
        if len(streams) == len(STANDARD_STREAMS):
            return Request(**json.loads(body), connection=connection, streams=streams)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("a request for a worker is not understood: %s", error)
    close(streams)
    return None


def close(descriptors: Iterable[int]) -> None:
    """Close those of a request that is not for this process."""
    for descriptor in descriptors:
        os.close(descriptor)


def answer(connection: socket.socket, **said: str | int) -> None:
    """Tell the client, if it is still there."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(said).encode() + b"\n")


def serve(listener: socket.socket, raylet: int) -> Request | None:
    """Fork workers until none is needed; None in the server at its end, the request in a worker."""
    workers = 0
    idle_s = 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(raylet, selectors.EVENT_READ)
        while idle_s < _IDLE_S:
            ready = {key.fileobj for key, _ in selector.select(_LOOK_S)}
            if raylet in ready:
                return None
            with contextlib.suppress(ChildProcessError):
                while workers and os.waitpid(-1, os.WNOHANG)[0]:
                    workers -= 1
            idle_s = 0.0 if workers or ready else idle_s + _LOOK_S
            if listener not in ready:
                continue
            connection, _ = listener.accept()
            request = receive(connection)
            if request is not None:
                if reason := why_not():
                    answer(connection, refused=reason)
                elif os.fork() == 0:
                    return request
                else:
                    workers += 1
                close(request.streams)
            connection.close()
    return None


def become(request: Request) -> None:
    """Make this fork what the client's process would have been, and run the worker in it."""
    with contextlib.suppress(OSError):  # the client is gone, or leads no group
        os.setpgid(0, os.getpgid(request.client))
    with contextlib.suppress(OSError):
        score = Path(f"/proc/{request.client}/oom_score_adj").read_text()
        Path("/proc/self/oom_score_adj").write_text(score)
    for descriptor, standard in zip(request.streams, STANDARD_STREAMS, strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    request.connection.settimeout(None)
    threading.Thread(target=_end_with, args=(request.connection,), daemon=True).start()
    answer(request.connection, worker=os.getpid())
    sys.argv = request.command
    sys.path[0] = str(Path(request.command[0]).parent)
    runpy.run_path(request.command[0], run_name="__main__")


def _end_with(client: socket.socket) -> None:
    """Ray kills a worker that has not reported yet by the process that it started: the client."""
    with contextlib.suppress(OSError):
        client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Listen, import, and fork."""
    name, raylet, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:
            return  # another one was faster
        listener.listen()
        os.close(ready)
        try:
            node = os.pidfd_open(raylet)
        except ProcessLookupError:
            return
        for module in filter(None, os.environ.get(MODULES, "").split(",")):
            try:
                importlib.import_module(module)
            except Exception:
                logger.warning("%s cannot be imported ahead of time", module, exc_info=True)
        end_threads_that_see_to_forks()
        gc.collect()
        gc.freeze()
        request = serve(listener, node)
        os.close(node)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
