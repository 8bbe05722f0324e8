"""A fork of the fork server: what is asked for, and how the fork becomes that.

Promises: it has the command line, environment, folder, descriptors, process group, niceness and
processors of its client, and ends with it. Nothing is imported here that a worker would not have.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ebbtide.platform.ray_seam import fork_client

logger = logging.getLogger(__name__)

_REQUEST_S = 5.0

_server = ""


@dataclass
class Request:
    """A process to fork: its command line after ``python``, environment and folder.

    ``client`` is the process that stands for it; the connection is open for as long as both live.
    ``given`` are the descriptors as they were received, ``descriptors`` their numbers there.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    client: int
    descriptors: list[int]
    connection: socket.socket
    given: list[int]


def receive(connection: socket.socket) -> Request | None:
    """A client's request; None if it is not ours, has gone, or says something else."""
    connection.settimeout(_REQUEST_S)
    if not fork_client.is_ours(connection):
        return None
    given: list[int] = []
    try:
        head, received, _, _ = socket.recv_fds(connection, 4, fork_client.MAX_DESCRIPTORS)
        for descriptor in received:
            given.append(
                fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, fork_client.HIGH_DESCRIPTOR)
            )
            os.close(descriptor)
        with connection.makefile("rb") as stream:
            body = stream.read(int.from_bytes(head, "big"))
        request = Request(**json.loads(body), connection=connection, given=given)
        if len(request.descriptors) == len(given) > 0:
            connection.setblocking(True)  # for the fork, too, which shares it
            return request
    except (OSError, ValueError, TypeError) as error:
        logger.warning("a request for a process is not understood: %s", error)
    for descriptor in given:
        os.close(descriptor)
    return None


def answer(connection: socket.socket, **said: str | int) -> None:
    """Tell the client, if it is still there."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(said).encode() + b"\n")


def become(request: Request, server: str, set_by_imports: Mapping[str, str]) -> None:
    """Make this fork what the client's process would have been, and run its command.

    ``server`` is the name of the fork server; ``set_by_imports`` what imports have done to the
    environment, but for what the client has set otherwise.
    """
    global _server
    _server = server
    with contextlib.suppress(OSError):  # the client is gone
        os.setpgid(0, os.getpgid(request.client))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.client))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(request.client))
    with contextlib.suppress(OSError):
        score = Path(f"/proc/{request.client}/oom_score_adj").read_text()
        Path("/proc/self/oom_score_adj").write_text(score)
    high = fcntl.fcntl(request.connection, fcntl.F_DUPFD_CLOEXEC, fork_client.HIGH_DESCRIPTOR)
    request.connection.close()
    for descriptor, number in zip(request.given, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    if "-c" in request.command:
        _find_title()
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ.update(set_by_imports)
    tempfile.tempdir = None  # another environment may have another one
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threading.Thread(target=_end_with, args=(high,), daemon=True).start()
    run(request.command)


def _find_title() -> None:
    """Have setproctitle, as vLLM's processes have it, find this process's title in memory: it looks
    where the environment begins, which is elsewhere later. Not in Ray's workers: Ray has the same
    code built in, and whichever is second finds nothing."""
    os.environ["SPT_NOENV"] = "1"
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").getproctitle()


def run(command: list[str]) -> None:
    """What ``python`` does with these arguments: a script or ``-c``; options count for nothing."""
    if "-c" in command:
        at = command.index("-c")
        sys.argv = ["-c", *command[at + 2 :]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(command[at + 1], "<string>", "exec"), vars(main))
        return
    sys.argv = command
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _end_with(client: int) -> None:
    """Who kills the process that was started, and that the client is, means this one.

    The fork server sees to that, too, while it lives: this process may be at work that lets none of
    its threads run.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=client) as connection:
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def fork_children() -> bool:
    """Have what this process starts by ``multiprocessing`` forked from the fork server that it is
    a fork of itself; False if it is none.

    The executable for that is in memory, and there for as long as this process is.
    """
    if not _server:
        return False
    client = [sys.executable, "-I", "-S", str(fork_client.__file__), fork_client.OF_SERVER, _server]
    script = os.memfd_create("forked-python", os.MFD_CLOEXEC)
    os.write(script, f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n'.encode())
    path = f"/proc/{os.getpid()}/fd/{script}"
    if not os.access(path, os.X_OK):  # a kernel may be told that such memory is never run
        os.close(script)
        return False
    multiprocessing.set_executable(path)
    return True
