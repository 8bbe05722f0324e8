"""Evictions, kills, hangs and new nodes for a local cluster: by a plan, or one by one.

``Chaos(LocalNodes(address), plan).run()`` carries a plan out; :meth:`Chaos.kill` and the like do a
single thing at once. Promises: everything is logged with the moment at which it was done; what is
stopped goes on again, and what is drained is taken away, at the latest at the end; what cannot be
done is skipped and says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from ebbtide.platform.chaos_plan import Event, Plan
from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError

if TYPE_CHECKING:
    from ebbtide.platform.local_nodes import LocalNode  # it imports Ray and torch

_TICK_S = 0.05

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


class Chaos:
    """One at a time for a cluster. ``tell`` hears of everything at once, where it is done.

    ``last_step`` gives the run's last finished step; it is asked only for plans that wait for one.
    As a context manager it carries the plan out in a thread, and ends with the block.
    """

    def __init__(
        self,
        nodes: Nodes,
        plan: Plan | None = None,
        *,
        last_step: Callable[[], int | None] = lambda: None,
        tell: Callable[[Happening], None] = lambda happening: None,
        clock: Clock | None = None,
        adder: Executor | None = None,
    ) -> None:
        self._nodes, self._plan = nodes, plan or Plan()
        self._last_step, self._tell, self._clock = last_step, tell, clock or SystemClock()
        self._lock = threading.RLock()
        self._log: list[Happening] = []
        self._done: set[int] = set()
        self._later: list[_Later] = []
        self._out_of_use: set[str] = set()  # drained or stopped
        self._adder = adder or ThreadPoolExecutor(1)  # it takes seconds, and others are due
        self._adding: list[Future[Happening]] = []
        self._began_s: float | None = None
        self._step: int | None = None
        self._event: int | None = None
        self._ending = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def log(self) -> list[Happening]:
        """Everything so far, in the order in which it was done."""
        with self._lock:
            return list(self._log)

    # -- one by one ------------------------------------------------------------------------------

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

    # -- by the plan -----------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> list[Happening]:
        """Carry the plan out, from now, until it is done or ``until()``; the log. Blocks.

        Raises ClusterError if a node cannot be added or the cluster is gone.
        """
        try:
            while not self._ended.is_set() and not until() and self.tick():
                self._clock.sleep(_TICK_S)
        finally:
            self.finish()
        return self.log

    def tick(self) -> bool:
        """Do what is due; whether there is more to come."""
        with self._lock:
            now_s = self._clock.monotonic()
            if self._began_s is None:
                self._began_s = now_s
            if self._waits_for_a_step():
                self._step = self._last_step()
            for later in [each for each in self._later if each.due_s <= now_s]:
                self._later.remove(later)
                later.act()
            for index in self._plan.due(self._done, now_s - self._began_s, self._step):
                self._done.add(index)
                self._carry_out(index)
        self._collect([each for each in self._adding if each.done()])
        return len(self._done) < len(self._plan.events) or bool(self._later or self._adding)

    def finish(self) -> None:
        """Let go on what is stopped, take away what is drained, await what is being added."""
        with self._lock:
            later, self._later = self._later, []
            self._ending = True
            for each in later:
                if each.at_end:
                    each.act()
        self._collect(list(self._adding))
        self._adder.shutdown()

    def __enter__(self) -> Chaos:
        self._thread = threading.Thread(target=self._run_in_thread, name="ebbtide-chaos")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except ClusterError as error:
            self._failure = error

    # -- how -------------------------------------------------------------------------------------

    def _carry_out(self, index: int) -> None:
        event, usable = self._plan.events[index], [node.name for node in self.usable()]
        self._event = index
        try:
            if event.do == "add":
                for _ in range(event.count):
                    self._add_later()
                return
            victims = self._plan.victims(index, usable)
            if not victims:
                wanted = event.node or f"{event.count} nodes"
                self._skip(f"{wanted} wanted; usable: {', '.join(usable) or 'none'}")
            elif not self._plan.spares_enough(index, len(usable)):
                self._skip(f"keep_nodes is {self._plan.keep_nodes}; usable: {', '.join(usable)}")
            else:
                for name in victims:
                    self._do(event, name)
        finally:
            self._event = None

    def _do(self, event: Event, name: str) -> None:
        try:
            match event.do, event.target:
                case "drain", _:
                    self.drain(name, event.deadline_s)
                case "kill", "node":
                    self.kill(name)
                case "kill", "worker":
                    self.kill_worker(name, event.named or "")
                case "stop", "node":
                    self.stop(name, event.for_s)
                case "stop", "worker":
                    self.stop_worker(name, event.for_s, event.named or "")
        except _NotThere as error:
            self._skip(str(error))

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
        if self._plan.replace_after_s is not None and not self._ending:
            self._schedule(self._plan.replace_after_s, self._add_later, at_end=False)

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

    def _collect(self, adding: list[Future[Happening]]) -> None:
        for each in adding:
            self._adding.remove(each)
            each.result()

    def _waits_for_a_step(self) -> bool:
        events = enumerate(self._plan.events)
        return any(event.at_step is not None and i not in self._done for i, event in events)

    def _node(self, name: str) -> LocalNode:
        found = self._nodes.nodes()
        for node in found:
            if node.name == name:
                return node
        raise _NotThere(f"{name} is not there; live: {', '.join(n.name for n in found) or 'none'}")

    def _worker(self, name: str, named: str) -> tuple[LocalNode, int]:
        node = self._node(name)
        workers = self._nodes.busy_workers(node, named)
        if not workers:
            raise _NotThere(f"{name} has no busy worker process{named and f' named {named}'}")
        return node, workers[0]

    def _skip(self, why: str) -> None:
        self._append(Happening("skip", self._clock.time(), why=why))

    def _note(self, deed: Deed, node: LocalNode, pid: int | None = None) -> Happening:
        return self._append(Happening(deed, self._clock.time(), node.name, node.node_id, pid))

    def _append(self, happening: Happening, event: int | None = None) -> Happening:
        event = self._event if event is None else event
        complete = replace(happening, event=event, step=self._step)
        self._log.append(complete)
        self._tell(complete)
        return complete


class _NotThere(ClusterError):
    """The node or worker that something was to be done to does not exist (any more)."""
