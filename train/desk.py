"""The desk: what driver, controller and ranks of one run tell each other.

A small named actor beside the driver, so that it outlives every node that may be lost. It decides
nothing and stores nothing for long: events wait here until the driver takes them to the run's
storage. Its name belongs to the run, so a second driver of the same run on the same cluster is
refused by Ray. :class:`Desk` is a plain object and is tested as one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import ClusterError
from ebbtide.train.elastic import Running, Wish
from ebbtide.train.events import (
    Event,
    GenerationBegan,
    LeaveAsked,
    Left,
    Notice,
    Remark,
    Skipped,
    Waiting,
)
from ebbtide.train.pace import Pace
from ebbtide.train.rhythm import NO_INTERRUPTIONS, Interruptions

NAMESPACE = "ebbtide"
_WAITING_REPEAT_S = 30.0
OWN_WILL = ("growth", "market", "budget")
"""What reasons to leave begin with that are no interruption from outside."""


@dataclass(frozen=True)
class Standing:
    """The newest generation, as the controller has to know it."""

    attempt: int
    running: Running


class Desk:
    """``first_attempt`` is the number of attempts that earlier drivers of the run made.

    ``placed`` are the nodes of the last one's ranks, ``interruptions`` those that they met.
    """

    def __init__(
        self,
        first_attempt: int = 0,
        skipped: Sequence[int] = (),
        placed: Sequence[str] = (),
        interruptions: Interruptions = NO_INTERRUPTIONS,
    ) -> None:
        self._placed = tuple(placed)
        self._next_attempt = first_attempt
        self._standing: Standing | None = None
        self._leave: str | None = None
        self._held: tuple[str, ...] = ()
        self._waited_s = 0.0
        self._waited_for: tuple[int, int] | None = None
        self._not_before_s = 0.0
        self._skipped = tuple(skipped)
        self._interruptions, self._opened_s = interruptions, time.monotonic()
        self._announced: set[str] = set()
        self._remarks: set[str] = set()
        self._pace = Pace(time.time())
        self._events: list[Event] = []
        self._runtime_env = "{}"
        self._wish: Wish | None = None
        self._market_state: Any = None

    # -- ranks -----------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], runtime_env: str = "{}") -> int:
        """A generation's ranks are up, on these nodes: its attempt number. By rank 0.

        ``runtime_env`` is Ray's text of the ranks' environment.
        """
        self._runtime_env, self._placed = runtime_env, tuple(nodes)
        attempt, self._next_attempt = self._next_attempt, self._next_attempt + 1
        now_s = time.time()
        if self._standing is not None and not (self._leave or "").startswith(OWN_WILL):
            before = self._interruptions
            self._interruptions = replace(before, count=before.count + 1)
        self._standing = Standing(attempt, Running(tuple(nodes), now_s, has_left=False))
        self._leave = None
        self._waited_for = None
        self._remarks.clear()
        self.post(
            GenerationBegan(
                time_s=now_s, attempt=attempt, world_size=len(nodes), nodes=tuple(nodes)
            )
        )
        return attempt

    def reason_to_leave(self, attempt: int) -> str | None:
        """Why this generation should save and leave, or None. By rank 0, often."""
        return self._leave if self._is_current(attempt) else None

    def left(self, attempt: int, step: int) -> None:
        """This generation has saved after ``step`` steps and waits to be ended. By rank 0."""
        standing = self._standing
        if standing is not None and standing.attempt == attempt:
            self._standing = Standing(attempt, replace(standing.running, has_left=True))
            self.post(Left(time_s=time.time(), attempt=attempt, step=step))

    def skipped(self) -> tuple[int, ...]:
        """The steps whose batch is left out. By ranks and controller."""
        return self._skipped

    def interruptions(self) -> Interruptions:
        """How often the run was evicted, killed or failed so far. By rank 0, as it begins."""
        before = self._interruptions
        passed_s = time.monotonic() - self._opened_s
        return replace(before, observed_s=before.observed_s + passed_s)

    def post(self, event: Event) -> None:
        """Something has happened."""
        self._pace.add(event)
        if isinstance(event, Skipped):
            self._skipped = (*self._skipped, event.step)
        self._events.append(event)

    # -- controller ------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """The newest generation."""
        standing = self._standing
        if standing is None:
            return None
        return Standing(standing.attempt, self._pace.measured(standing.running, time.time()))

    def placed(self) -> tuple[tuple[str, ...], int]:
        """The nodes of the newest generation's ranks, and the next attempt's number."""
        return self._placed, self._next_attempt

    def ask_to_leave(self, attempt: int, reason: str) -> None:
        """Ask a generation to save and leave. Asking again changes nothing."""
        if self._is_current(attempt) and self._leave is None:
            self._leave = reason
            self.post(LeaveAsked(time_s=time.time(), attempt=attempt, reason=reason))

    def remark(self, attempt: int, text: str) -> None:
        """Why the running generation is left as it is; the same kind is kept once."""
        kind = text.partition(":")[0]
        if self._is_current(attempt) and kind not in self._remarks:
            self._remarks.add(kind)
            self.post(Remark(time_s=time.time(), attempt=attempt, text=text))

    def announce(self, going: Mapping[str, float | None]) -> None:
        """These nodes of the run are announced to go, with their deadlines. Kept once a node."""
        for node in sorted(going.keys() - self._announced):
            self._announced.add(node)
            self.post(Notice(time_s=time.time(), node=node, deadline_s=going[node]))

    def hold(self, nodes: Sequence[str]) -> None:
        """The nodes that the run has at present."""
        self._held = tuple(nodes)

    def wait_until(self, time_s: float) -> None:
        """The next generation does not start before that time (epoch seconds)."""
        self._not_before_s = time_s

    def not_before(self) -> float:
        """See :meth:`wait_until`."""
        return self._not_before_s

    def is_held(self) -> bool:
        """Whether the run waits for a price or a market: its nodes are to be free. By ranks."""
        waits = self._wish is not None and self._wish.labels is None
        return self._not_before_s == math.inf or waits

    def waiting(self, needs: int, has: int) -> None:
        """The run cannot (re)start: it needs more workers than it has."""
        now_s = time.time()
        if (needs, has) != self._waited_for or now_s - self._waited_s >= _WAITING_REPEAT_S:
            self._waited_s, self._waited_for = now_s, (needs, has)
            self.post(Waiting(time_s=now_s, needs=needs, has=has))

    # -- market ----------------------------------------------------------------------------------

    def change_wish(self, wish: Wish, change: Event) -> None:
        """Where the market wants the run from now on."""
        self._wish = wish
        self.post(change)

    def wish(self) -> Wish | None:
        """See :meth:`change_wish`; None in a job without a market. By the controller."""
        return self._wish

    def keep_market(self, state: Any) -> None:
        """What the market's controller has to know if its process is restarted."""
        self._market_state = state

    def market_state(self) -> Any:
        """See :meth:`keep_market`; None at first."""
        return self._market_state

    # -- driver ----------------------------------------------------------------------------------

    def runtime_env(self) -> str:
        """Ray's text of the environment of the newest generation's ranks."""
        return self._runtime_env

    def take(self) -> tuple[list[Event], tuple[str, ...]]:
        """The events since the last call, and the nodes that the run has."""
        events, self._events = self._events, []
        return events, self._held

    def _is_current(self, attempt: int) -> bool:
        return self._standing is not None and self._standing.attempt == attempt


def actor_name(run_uri: str) -> str:
    """The desk's actor name: one for a run, whatever characters its URI has."""
    return f"run-{sha256(run_uri.encode())[:24]}"


def open_desk(
    run_uri: str,
    first_attempt: int,
    skipped: Sequence[int],
    placed: Sequence[str],
    interruptions: Interruptions = NO_INTERRUPTIONS,
) -> Any:
    """Start the desk of a run beside this driver; it ends with the driver.

    Raises ClusterError if another driver of this cluster has the run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": actor_name(run_uri),
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    try:
        past = (first_attempt, skipped, placed, interruptions)
        desk = ray.remote(Desk).options(**options).remote(*past)
        ray.get(desk.standing.remote())
    except ValueError as error:
        raise ClusterError(
            f"{run_uri}: this run is being trained on this cluster already; wait for it, stop it "
            "(ray job stop), or give this job another name"
        ) from error
    return desk


def find_desk(run_uri: str) -> Any:
    """The desk of a run, from its ranks and its controller."""
    import ray

    return ray.get_actor(actor_name(run_uri), namespace=NAMESPACE)
