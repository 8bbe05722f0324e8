"""A node's fork server: imports once what workers need, and forks a worker from that when asked.

Promises: a fork is only made while this process has one thread and no accelerator's device open,
since these do not live through a fork, and while forks draw different random numbers; the clients
are told the reason else.
Clients (:mod:`ebbtide.platform.ray_seam.fork_client`) are of the same user and container. The
server ends with the node's raylet, and when it has had no worker for a while.

It is a process of its own, or a fork of the node's one with early imports
(:mod:`ebbtide.platform.ray_seam.fork_early`).

``python -P -m ebbtide.platform.ray_seam.fork_server NAME RAYLET READY``: the name of an abstract
socket, the raylet's process number, a descriptor that is closed once the server listens.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from ebbtide.platform.ray_seam import fork_client
from ebbtide.platform.ray_seam.forked import Request, answer, become, receive

logger = logging.getLogger(__name__)

_IDLE_S = 30.0
_LOOK_S = 1.0
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_HARMLESS_THREADS = ("jemalloc_bg_thd",)
"""Threads of libraries that see to forks: PyArrow's allocator stops its own and goes on after."""


def end_threads_that_see_to_forks() -> None:
    """Fork once for nothing: a library such as OpenBLAS ends its threads before a fork, and starts
    them when it needs them again."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def ids_from_elsewhere() -> Iterator[None]:
    """Inside, Ray names the actor classes of imported modules without its own random generator,
    whose numbers, once it is in use, would be the same in all forks."""
    import ray.actor

    kind = ray.ActorClassID
    size = len(kind.nil().binary())
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(size)))
    try:
        yield
    finally:
        ray.actor.ActorClassID = kind


def draws_alike() -> bool:
    """Whether two forks would draw the same numbers from Ray's random generator."""
    from ray import UniqueID

    drawn = set()
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, UniqueID.from_random().binary())
            os._exit(0)
        os.waitpid(pid, 0)
        drawn.add(os.read(read, 100))
        os.close(read)
        os.close(write)
    return len(drawn) == 1


def unlike_a_fork() -> str:
    """What this process has and a fork of it would lack; empty if nothing."""
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if int(task.name) != os.getpid() and name not in _HARMLESS_THREADS:
            return f"the imported modules have started a thread, {name}"
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (path := os.readlink(entry.path)).startswith(_ACCELERATORS):
                return f"the imported modules have opened {path}"
    return ""


def why_not() -> str:
    """What makes a fork of this process unsafe; empty if nothing does."""
    if reason := unlike_a_fork():
        return reason
    if draws_alike():
        return "the imported modules have drawn random numbers, which all forks would draw again"
    return ""


class Server:
    """Forks for as long as it is needed."""

    def __init__(self, listener: socket.socket, raylet: int, idle_s: float) -> None:
        self._listener, self._raylet, self._idle_s = listener, raylet, idle_s
        self._workers: dict[int, socket.socket] = {}

    def run(self) -> Request | None:
        """None in the server at its end; in a worker, what it is to be."""
        ended, end = socket.socketpair()
        ended.setblocking(False)
        end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
        idle_s = 0.0
        with ended, end, selectors.DefaultSelector() as selector:
            watched: tuple[socket.socket | int, ...] = (self._listener, self._raylet, ended)
            for each in watched:
                selector.register(each, selectors.EVENT_READ)
            while idle_s < self._idle_s:
                ready = {key.fileobj for key, _ in selector.select(_LOOK_S)}
                if self._raylet in ready:
                    return None
                if ended in ready:
                    ended.recv(4096)
                    self._reap(selector)
                for pid, connection in self._workers.items():
                    if connection in ready:  # the client is gone
                        selector.unregister(connection)
                        os.kill(pid, signal.SIGKILL)
                idle_s = 0.0 if self._workers or ready else idle_s + _LOOK_S
                if self._listener in ready and (request := self._fork(selector)) is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return request
        return None

    def _fork(self, selector: selectors.BaseSelector) -> Request | None:
        """Answer one client; its request in the fork."""
        connection, _ = self._listener.accept()
        request = receive(connection)
        if request is None:
            connection.close()
            return None
        pid = 0
        try:
            reason = why_not()
            pid = 0 if reason else os.fork()
        except OSError as error:  # too many processes, or too little memory
            reason = f"the fork server cannot fork: {error}"
        if not reason and pid == 0:
            for each in self._workers.values():
                each.close()
            answer(connection, worker=os.getpid())  # not the server: it may die before it does
            return request
        for descriptor in request.given:
            os.close(descriptor)
        if reason:
            answer(connection, refused=reason)
            connection.close()
        else:
            self._workers[pid] = connection
            selector.register(connection, selectors.EVENT_READ)
        return None

    def _reap(self, selector: selectors.BaseSelector) -> None:
        """Tell the clients whose workers have ended."""
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._workers.pop(pid) as connection:
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    answer(connection, exit=os.waitstatus_to_exitcode(status))


def import_all(modules: Iterable[str]) -> None:
    """Import the modules; one that cannot be is told of and left out."""
    gc.disable()  # what imports make stays: to look through it takes a quarter of their time
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            logger.warning("%s cannot be imported ahead of time", module, exc_info=True)
    sys.stdout.flush()  # else every fork would say again what the imports have said
    end_threads_that_see_to_forks()
    gc.collect()
    gc.freeze()
    gc.enable()


def bound(name: str) -> socket.socket | None:
    """The socket of a server, which listens; None if another process was faster."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        listener.close()
        return None
    listener.listen()
    return listener


def serve(listener: socket.socket, name: str, raylet: int, environment: Mapping[str, str]) -> None:
    """Import what the workers need, and fork them; returns at the server's end, and at a worker's.

    ``environment`` is that with which this process was started, before any import.
    """
    with listener:
        try:
            node = os.pidfd_open(raylet)
        except ProcessLookupError:
            return
        with ids_from_elsewhere():
            import_all(filter(None, os.environ.get(fork_client.MODULES, "").split(",")))
        idle_s = float(os.environ.get(fork_client.IDLE_S) or _IDLE_S)
        request = Server(listener, node, idle_s).run()
        os.close(node)
    if request is not None:
        become(request, name, set_by_imports(environment, request.environment))


def set_by_imports(before: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """What imports have done to the environment, but for what a client has set otherwise."""
    return {
        name: text
        for name, text in os.environ.items()
        if text != before.get(name) == theirs.get(name)
    }


def main() -> None:
    """Listen, import, and fork."""
    name, raylet, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    before = dict(os.environ)
    listener = bound(name)
    if listener is not None:
        os.close(ready)
        serve(listener, name, raylet, before)


if __name__ == "__main__":
    main()
