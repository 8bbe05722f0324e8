"""Stands in for Python as the executable of a worker process: has it forked, not started.

Ray runs ``bash -c "exec <py_executable> default_worker.py ..."`` for each worker (its runtime
environment's ``py_executable``). With this file as the executable the worker is a fork of the
node's fork server (:mod:`ebbtide.platform.ray_seam.fork_server`), which has its imports behind it;
the first that asks starts the server. What a worker starts itself by ``multiprocessing`` can be
forked from the same server (``--server NAME`` before the arguments). Where no fork can be had, this
process becomes what would have been started, and says why on stderr.

Run by its path, in isolation and without site: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

SERVER = "ebbtide.platform.ray_seam.fork_server"
MODULES = "EBBTIDE_FORK_MODULES"
"""Environment variable: what the fork server imports, separated by commas."""
IDLE_S = "EBBTIDE_FORK_IDLE_S"
"""Environment variable: seconds without a worker after which the fork server ends."""
EARLY = "EBBTIDE_FORK_EARLY"
"""Environment variable: the socket of the node's process with early imports."""
OF_SERVER = "--server"

NAME = "fork-"
"""A client calls itself so (``/proc/PID/comm``), with the number of its process's fork."""

TRACKER = "multiprocessing.resource_tracker"
"""A process with this in its command line removes what others leave, and needs no imports."""

STANDARD_STREAMS = (0, 1, 2)
MAX_DESCRIPTORS = 250
"""The kernel passes 253 at a time."""
HIGH_DESCRIPTOR = 512
"""From here on a fork puts its own out of the way of those that it is given."""

_READ_LATER = ("RAY_", "__RAY_", "EBBTIDE_", "AWS_")
"""Beginnings of variables that no library reads which is imported early."""
_OF_RAY_START: Mapping[str, str] = {"SPT_NOENV": "1"}
"""What ``ray start`` sets for all that it starts."""

_PRELOAD = "LD_PRELOAD"

MINE = ("_", "SHLVL", "PWD", "OLDPWD", "RAY_WORKER_ID")
"""Variables that may differ from worker to worker without a fork being different."""


def address(environment: Mapping[str, str], node: int) -> str:
    """Name of the abstract socket of a node's fork server for workers of this environment.

    ``node`` is the process number of the node's raylet, which other containers in the same network
    may have, too. What was imported under one environment is not forked into another.
    """
    relevant = sorted((name, text) for name, text in environment.items() if name not in MINE)
    text = json.dumps([node, _container("self"), os.getuid(), sys.executable, relevant])
    return f"ebbtide-fork-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def start_server(name: str, node: int) -> None:
    """Have a fork server that listens; or find that another one does.

    It is forked from the node's process with early imports, where there is one that fits.
    """
    if (early := os.environ.get(EARLY)) and _forked_early(early, name, node):
        return
    read, write = os.pipe()
    with open(read, "rb") as ready:
        subprocess.Popen(
            # -P: what lies in the folder of the first worker is not to be imported
            [sys.executable, "-P", "-m", SERVER, name, str(node), str(write)],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a group of its own: Ray kills its workers by their groups
        )
        os.close(write)
        ready.read()


def differing(ours: Mapping[str, str | None], theirs: Mapping[str, str]) -> str:
    """Why imports made in the one environment are of no use in the other; empty if they are."""
    ours = {**ours, **_OF_RAY_START}
    names = [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
        and not name.startswith(_READ_LATER)
        and name not in MINE
    ]
    return f"those made early have seen other values of {', '.join(names)}" if names else ""


def _forked_early(early: str, name: str, node: int) -> bool:
    """Whether the fork server was forked; the reason goes to stderr else.

    It is not asked for what it would refuse: it answers only when its imports are done.
    """
    try:
        with open(f"/proc/{node}/environ", "rb") as environment:
            lines = os.fsdecode(environment.read()).split("\0")
        raylets = dict(line.split("=", 1) for line in lines if "=" in line)
        # Ray gives a raylet an allocator of its own
        if refused := differing(raylets | {_PRELOAD: os.environ.get(_PRELOAD)}, os.environ):
            raise OSError(refused)
        with _asked(early, [sys.executable, name, str(node)], STANDARD_STREAMS) as (_, answer):
            if "worker" in answer:
                return True
            refused = answer["refused"]
    except OSError as error:
        refused = str(error)
    print(f"imports begin only now: {refused}", file=sys.stderr, flush=True)
    return False


def is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is of this user and container.

    Whoever is in this network, as other containers may be, can take a name, and connect to it.
    """
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    try:
        return bool(user == os.getuid() and _container(process) == _container("self"))
    except OSError:  # it has ended, or is out of sight
        return False


def _container(process: int | str) -> list[str]:
    return [os.readlink(f"/proc/{process}/ns/{kind}") for kind in ("pid", "mnt")]


def fork(name: str, command: Sequence[str], descriptors: Sequence[int]) -> str:
    """Have the command forked with these descriptors, wait for its end, and end like it; returns
    the reason if it cannot be forked.

    Raises OSError when there is no server, and never once there is a fork.
    """
    if len(descriptors) > MAX_DESCRIPTORS or max(descriptors) >= HIGH_DESCRIPTOR:
        return "it has more descriptors, or higher ones, than a fork can be given"
    with _asked(name, command, descriptors) as (answers, answer):
        if "worker" not in answer:
            return str(answer["refused"])
        _stand_for(answer["worker"], descriptors)
        try:
            code = json.loads(answers.readline())["exit"]
        except (OSError, ValueError):  # the server is gone, and now the fork is, too
            code = 1
    _end_as(code)


@contextlib.contextmanager
def _asked(
    name: str, command: Sequence[str], descriptors: Sequence[int]
) -> Iterator[tuple[BinaryIO, dict[str, Any]]]:
    """Ask a server for a fork: what it says from now on, and its first answer, with ``worker`` (the
    fork's process number) or ``refused`` (the reason).

    Raises OSError when there is no server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(f"\0{name}")
        if not is_ours(server):
            other = "the fork server is another user's, or another container's"
            yield io.BytesIO(), {"refused": other}
            return
        request = {
            "command": list(command),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "client": os.getpid(),
            "descriptors": list(descriptors),
        }
        body = json.dumps(request).encode()
        socket.send_fds(server, [len(body).to_bytes(4, "big")], descriptors)
        server.sendall(body)
        with server.makefile("rb") as answers:
            said = answers.readline() or b'{"refused": "the fork server is gone"}'
            yield (
                answers,
                {"refused": "the fork has ended before its beginning", **json.loads(said)},
            )


def _stand_for(worker: int, descriptors: Sequence[int]) -> None:
    """Pass signals on, hold nothing that is the worker's, and say which that is."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as own:
        own.write(f"{NAME}{worker}")


def _end_as(code: int) -> NoReturn:
    """End with a worker's exit code, or by the signal of which it died (negative)."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def inherited() -> list[int]:
    """The descriptors that were given to this process beside the standard streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if int(name) > max(STANDARD_STREAMS) and os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


def main() -> None:
    """Be the worker, by a fork or in this process."""
    command = sys.argv[1:]
    try:
        if command[0] == OF_SERVER:
            _, name, *command = command
            if any(TRACKER in each for each in command):
                refused = "it is a resource tracker"
            else:
                refused = fork(name, command, [*STANDARD_STREAMS, *inherited()])
        else:
            node = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
            name = address(os.environ, node)
            try:
                refused = fork(name, command, STANDARD_STREAMS)
            except ConnectionRefusedError:
                start_server(name, node)
                refused = fork(name, command, STANDARD_STREAMS)
    except OSError as error:
        refused = str(error)
    print(f"this process is started, not forked: {refused}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
