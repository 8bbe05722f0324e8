"""Harm to a local cluster, deed by deed: evictions, kills, hangs, and new nodes.

Promises: every deed is logged with its moment; what cannot be done raises :class:`NotThere` and is
not logged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError

if TYPE_CHECKING:
    from ebbtide.platform.local_nodes import LocalNode  # it imports Ray and torch

Deed = Literal["drain", "take_away", "kill", "kill_worker", "stop", "go_on", "add", "skip"]


@dataclass(frozen=True)
class Happening:
    """Something that was done to a node at ``time_s`` (epoch seconds; for ``add``: has joined).

    ``event`` is the plan's event (its index) that it belongs to, ``step`` the run's last finished
    step where that is known, ``pid`` the worker's process, ``why`` the reason for a ``skip``.
    """

    deed: Deed
    time_s: float
    node: str | None = None
    node_id: str | None = None
    pid: int | None = None
    event: int | None = None
    step: int | None = None
    why: str | None = None


class Nodes(Protocol):
    """The nodes and what can be done to them: :class:`~ebbtide.platform.local_nodes.LocalNodes`."""

    def nodes(self) -> list[LocalNode]: ...
    def busy_workers(self, node: LocalNode, named: str = "") -> list[int]: ...
    def drain(self, node: LocalNode, deadline_s: float) -> None: ...
    def kill(self, node: LocalNode) -> None: ...
    def kill_worker(self, pid: int) -> None: ...
    def stop(self, node: LocalNode) -> Callable[[], None]: ...
    def stop_worker(self, pid: int) -> Callable[[], None]: ...
    def add(self) -> str: ...


@dataclass(frozen=True)
class _Later:
    """What follows from something that was done."""

    due_s: float  # monotonic
    act: Callable[[], None]
    at_end: bool  # it is done at the end even if it is not due


class NotThere(ClusterError):
    """The node or worker that something was to be done to does not exist (any more)."""


class Deeds:
    """``tell`` hears of every deed at once, where it is done. Thread-safe.

    A node that is gone is replaced ``replace_after_s`` later, if that is given. What follows later
    is only noted here; :class:`~ebbtide.platform.chaos.Chaos` does it.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        replace_after_s: float | None = None,
        tell: Callable[[Happening], None] = lambda happening: None,
        clock: Clock | None = None,
        adder: Executor | None = None,
    ) -> None:
        self._nodes, self._replace_after_s, self._tell = nodes, replace_after_s, tell
        self._clock = clock or SystemClock()
        self._adder = adder or ThreadPoolExecutor(1)  # it takes seconds, and others are due
        self._lock = threading.RLock()
        self._log: list[Happening] = []
        self._later: list[_Later] = []
        self._out_of_use: set[str] = set()  # drained or stopped
        self._adding: list[Future[Happening]] = []
        self._step: int | None = None
        self._event: int | None = None

    @property
    def log(self) -> list[Happening]:
        """Everything so far, in the order in which it was done."""
        with self._lock:
            return list(self._log)

    def usable(self) -> list[LocalNode]:
        """The live nodes that are neither drained nor stopped here."""
        return [node for node in self._nodes.nodes() if node.node_id not in self._out_of_use]

    def drain(self, name: str, deadline_s: float, *, take_away: bool = True) -> Happening:
        """Announce that a node goes in ``deadline_s`` seconds; in :meth:`run` it then does."""
        with self._lock:
            node = self._node(name)
            self._nodes.drain(node, self._clock.time() + deadline_s)
            happening = self._note("drain", node)
            self._out_of_use.add(node.node_id)
            if take_away:
                self._schedule(deadline_s, lambda: self._take_away(node), at_end=True)
            return happening

    def take_away(self, name: str) -> Happening | None:
        """End a drained node now. None if it has ended by itself, as Ray's idle ones do."""
        with self._lock:
            node = next((each for each in self._nodes.nodes() if each.name == name), None)
            return None if node is None else self._take_away(node)

    def kill(self, name: str) -> Happening:
        """SIGKILL a node with everything on it."""
        with self._lock:
            node = self._node(name)
            happening = self._note("kill", node)
            self._nodes.kill(node)
            self._replace()
            return happening

    def kill_worker(self, name: str, named: str = "") -> Happening:
        """SIGKILL the first busy worker process of a node (with ``named`` in its title)."""
        with self._lock:
            node, pid = self._worker(name, named)
            happening = self._note("kill_worker", node, pid)
            self._nodes.kill_worker(pid)
            return happening

    def stop(self, name: str, for_s: float) -> Happening:
        """SIGSTOP a whole node; in :meth:`run` it goes on after ``for_s`` seconds."""
        with self._lock:
            node = self._node(name)
            happening = self._note("stop", node)
            self._out_of_use.add(node.node_id)
            self._go_on_later(for_s, self._nodes.stop(node), node)
            return happening

    def stop_worker(self, name: str, for_s: float, named: str = "") -> Happening:
        """SIGSTOP the first busy worker process of a node for ``for_s`` seconds, as above."""
        with self._lock:
            node, pid = self._worker(name, named)
            happening = self._note("stop", node, pid)
            self._go_on_later(for_s, self._nodes.stop_worker(pid), node, pid)
            return happening

    def add(self) -> Happening:
        """Start a node and wait until it has joined."""
        return self._add(None)

    def _take_away(self, node: LocalNode) -> Happening:
        happening = self._note("take_away", node)
        self._nodes.kill(node)
        self._replace()
        return happening

    def _go_on_later(
        self, for_s: float, go_on: Callable[[], None], node: LocalNode, pid: int | None = None
    ) -> None:
        def act() -> None:
            go_on()
            self._note("go_on", node, pid)
            self._out_of_use.discard(node.node_id)
            if pid is None and node not in self._nodes.nodes():
                self._replace()  # the cluster has given it up meanwhile

        self._schedule(for_s, act, at_end=True)

    def _replace(self) -> None:
        if self._replace_after_s is not None:
            self._schedule(self._replace_after_s, self._add_later, at_end=False)

    def _schedule(self, after_s: float, act: Callable[[], object], at_end: bool) -> None:
        event = self._event

        def with_event() -> None:
            self._event = event
            try:
                act()
            finally:
                self._event = None

        self._later.append(_Later(self._clock.monotonic() + after_s, with_event, at_end))

    def _add_later(self) -> None:
        self._adding.append(self._adder.submit(self._add, self._event))

    def _add(self, event: int | None) -> Happening:
        name = self._nodes.add()
        node_id = next((each.node_id for each in self._nodes.nodes() if each.name == name), None)
        with self._lock:
            return self._append(Happening("add", self._clock.time(), name, node_id), event)

    def _node(self, name: str) -> LocalNode:
        found = self._nodes.nodes()
        for node in found:
            if node.name == name:
                return node
        raise NotThere(f"{name} is not there; live: {', '.join(n.name for n in found) or 'none'}")

    def _worker(self, name: str, named: str) -> tuple[LocalNode, int]:
        node = self._node(name)
        workers = self._nodes.busy_workers(node, named)
        if not workers:
            raise NotThere(f"{name} has no busy worker process{named and f' named {named}'}")
        return node, workers[0]

    def _note(self, deed: Deed, node: LocalNode, pid: int | None = None) -> Happening:
        return self._append(Happening(deed, self._clock.time(), node.name, node.node_id, pid))

    def _append(self, happening: Happening, event: int | None = None) -> Happening:
        event = self._event if event is None else event
        complete = replace(happening, event=event, step=self._step)
        self._log.append(complete)
        self._tell(complete)
        return complete
