"""Stands in for Python as the executable of a Ray worker: has the worker forked, not started.

Ray runs ``bash -c "exec <py_executable> default_worker.py ..."`` for each worker (its runtime
environment's ``py_executable``). With this file as the executable the worker is a fork of the
node's fork server (:mod:`ebbtide.platform.ray_seam.fork_server`), which has its imports behind it;
the first that asks starts the server. Where no fork can be had, this process becomes the worker
that Ray would have started, and says why on stderr.

Run by its path, in isolation and without site: standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

SERVER = "ebbtide.platform.ray_seam.fork_server"
MODULES = "EBBTIDE_FORK_MODULES"
"""Environment variable: what the fork server imports, separated by commas."""

STANDARD_STREAMS = (0, 1, 2)
_MINE = ("_", "SHLVL", "PWD", "OLDPWD", "RAY_WORKER_ID")
"""Variables that may differ from worker to worker without a fork being different."""


def address(environment: Mapping[str, str], node: int) -> str:
    """Name of the abstract socket of a node's fork server for workers of this environment.

    ``node`` is the process number of the node's raylet. What was imported under one environment is
    never forked into another.
    """
    relevant = sorted((name, text) for name, text in environment.items() if name not in _MINE)
    text = json.dumps([node, os.getuid(), sys.executable, relevant])
    return f"\0ebbtide-fork-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def start_server(name: str, node: int) -> None:
    """Start a fork server and wait until it listens, or until it finds that another one does."""
    read, write = os.pipe()
    with open(read, "rb") as ready:
        subprocess.Popen(
            [sys.executable, "-m", SERVER, name[1:], str(node), str(write)],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a group of its own: Ray kills its workers by their groups
        )
        os.close(write)
        ready.read()


def fork(name: str, command: Sequence[str]) -> str:
    """Have the worker forked and wait for its end; the reason, if it cannot be forked.

    Raises OSError when there is no server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(name)
        request = {
            "command": list(command),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "client": os.getpid(),
        }
        body = json.dumps(request).encode()
        socket.send_fds(server, [len(body).to_bytes(4, "big")], STANDARD_STREAMS)
        server.sendall(body)
        with server.makefile("rb") as answers:
            answer = json.loads(answers.readline() or '{"refused": "the fork server is gone"}')
            if "refused" in answer:
                return str(answer["refused"])
            answers.read()  # the worker holds the other end for as long as it lives
    return ""


def main() -> None:
    """Be the worker, by a fork or in this process."""
    command, node = sys.argv[1:], os.getppid()
    name = address(os.environ, node)
    try:
        try:
            refused = fork(name, command)
        except ConnectionRefusedError:
            start_server(name, node)
            refused = fork(name, command)
    except OSError as error:
        refused = str(error)
    if refused:
        print(f"this worker is started, not forked: {refused}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
