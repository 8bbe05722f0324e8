"""Starts a node, and imports meanwhile what its workers will need.

``python -P -m ebbtide.platform.ray_seam.fork_early ray start ...`` becomes this ``ray start`` and
leaves a process that imports the libraries of :data:`MODULES`. The node's first fork server for an
environment (:mod:`ebbtide.platform.ray_seam.fork_server`) is then a fork of that process, and has
only Ray and ebbtide left to import: these look at variables that are known only once a job is.

Promises: ``ray start`` is run whatever becomes of the imports. A fork is refused, or not asked for,
where the imports might have come out differently: with another Python, or another environment but
for the variables that only Ray, ebbtide and clients of AWS read. The process ends with the node,
and when it has not been asked for some minutes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.platform.ray_seam import fork_client, fork_server
from ebbtide.platform.ray_seam.forked import Request, answer, receive

MODULE = "ebbtide.platform.ray_seam.fork_early"

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "pandas",
    "pyarrow",
    "fsspec",
    "pydantic",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
)
"""Libraries that do not import Ray. One that this Python does not have is left out."""

IMPORTED = "EBBTIDE_FORK_EARLY_MODULES"
"""Environment variable: what is imported instead of :data:`MODULES`, separated by commas."""

_IDLE_S = 300.0
_LOOK_S = 5.0


class EarlyServer:
    """Forks fork servers, which have ``on_hangup`` as their handler; ``environment`` is that of
    before the imports."""

    def __init__(
        self, listener: socket.socket, name: str, environment: Mapping[str, str], on_hangup: Any
    ) -> None:
        self._listener, self._name, self._environment = listener, name, environment
        self._on_hangup = on_hangup

    def run(self) -> None:
        """Returns at its own end, and at that of each process that was forked from it."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        asked_s = time.monotonic()
        while time.monotonic() < asked_s + _IDLE_S and self._has_node():
            if select.select([self._listener], [], [], _LOOK_S)[0]:
                asked_s = time.monotonic()
                connection, _ = self._listener.accept()
                with connection:
                    request = receive(connection)
                    if request is not None and self._fork(request):
                        return

    def _has_node(self) -> bool:
        """Whether a process of the node lives: they know of this server."""
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    if self._name.encode() in Path(entry.path, "environ").read_bytes():
                        return True
        return False

    def _fork(self, request: Request) -> bool:
        """Answer one client; in a fork True, at its end."""
        pid, refused = 0, ""
        try:
            refused = self._why_not(request)
            pid = 0 if refused else os.fork()
        except OSError as error:  # too many processes, or too little memory
            refused = f"the process with early imports cannot fork: {error}"
        if not refused and pid == 0:
            self._become_fork_server(request)
            return True
        for descriptor in request.given:
            os.close(descriptor)
        if refused:
            answer(request.connection, refused=refused)
        return False

    def _why_not(self, request: Request) -> str:
        if request.command[0] != sys.executable:
            return f"those made early are of another Python, {sys.executable}"
        return (
            fork_client.differing(self._environment, request.environment)
            or fork_server.unlike_a_fork()
        )

    def _become_fork_server(self, request: Request) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, self._on_hangup)
        signal.pthread_sigmask(signal.SIG_SETMASK, _blocked_by(request.client))
        os.setpgid(0, 0)  # as a fork server that is started
        self._listener.close()
        for descriptor, number in zip(request.given, request.descriptors, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request.folder)
        changed = fork_server.set_by_imports(self._environment, request.environment)
        wanted = {**request.environment, **changed}
        for each in os.environ.keys() - wanted.keys():
            del os.environ[each]
        for each, text in wanted.items():
            if os.environ.get(each) != text:  # what stays where it is tells where the title is
                os.environ[each] = text
        _, name, raylet = request.command
        listener = fork_server.bound(name)
        answer(request.connection, worker=os.getpid())
        request.connection.close()
        if listener is not None:
            fork_server.serve(listener, name, int(raylet), request.environment)


def _blocked_by(process: int) -> set[int]:
    """The signals that a process blocks."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigBlk:"):
                mask = int(line.split()[1], 16)
                return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    return set()


def _serve(listener: socket.socket, name: str, environment: Mapping[str, str], node: int) -> None:
    """Import, and serve once ``node``, the end of a pipe, says that the command runs."""
    on_hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nodes, which outlive terminals
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in fork_client.STANDARD_STREAMS:
        os.dup2(nothing, stream)  # who waits for the end of the output waits for the command's
    os.close(nothing)
    modules = environment.get(IMPORTED)
    fork_server.import_all(MODULES if modules is None else filter(None, modules.split(",")))
    os.read(node, 1)
    os.close(node)
    EarlyServer(listener, name, environment, on_hangup).run()


def main() -> None:
    """Fork: the one imports and serves, the other becomes the command."""
    command, environment = sys.argv[1:], dict(os.environ)
    if not command:
        sys.exit("fork_early: what is to be started? Write: fork_early ray start ...")
    name = f"ebbtide-early-{secrets.token_hex(16)}"
    listener = fork_server.bound(name)
    node, runs = os.pipe()  # both ends are closed when the command is run
    if listener is not None:
        if (between := os.fork()) == 0:
            if os.fork() > 0:
                os._exit(0)  # so that the command has no child of which it does not know
            os.close(runs)
            _serve(listener, name, environment, node)
            return
        os.waitpid(between, 0)
        os.environ[fork_client.EARLY] = name
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"fork_early: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
