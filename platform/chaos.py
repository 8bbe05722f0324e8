"""Evictions, kills, hangs and new nodes for a local cluster: by a plan, or one by one.

``Chaos(LocalNodes(address), plan).run()`` carries a plan out; :meth:`Chaos.kill` and the like, of
:class:`~ebbtide.platform.chaos_deeds.Deeds`, do a single thing at once. Promises: what is stopped
goes on again, and what is drained is taken away, at the latest at the end; what cannot be done is
skipped, and the log says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import TracebackType

from ebbtide.platform.chaos_deeds import Deeds, Happening, Nodes, NotThere
from ebbtide.platform.chaos_plan import Event, Plan
from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import ClusterError

_TICK_S = 0.05


class Chaos(Deeds):
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
        self._plan, self._last_step = plan or Plan(), last_step
        super().__init__(
            nodes,
            replace_after_s=self._plan.replace_after_s,
            tell=tell,
            clock=clock,
            adder=adder,
        )
        self._done: set[int] = set()
        self._began_s: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

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
            self._replace_after_s = None
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
        except NotThere as error:
            self._skip(str(error))

    def _collect(self, adding: list[Future[Happening]]) -> None:
        for each in adding:
            self._adding.remove(each)
            each.result()

    def _waits_for_a_step(self) -> bool:
        events = enumerate(self._plan.events)
        return any(event.at_step is not None and i not in self._done for i, event in events)

    def _skip(self, why: str) -> None:
        self._append(Happening("skip", self._clock.time(), why=why))
