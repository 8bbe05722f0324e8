"""The desk: what driver, controller and ranks of one run tell each other.

A small named actor beside the driver, so that it outlives every node that may be lost. It decides
nothing and stores nothing for long: events wait here until the driver takes them to the run's
storage. Its name belongs to the run, so a second driver of the same run on the same cluster is
refused by Ray. :class:`Desk` is a plain object and is tested as one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.platform.errors import ClusterError
from ebbtide.train.events import Event, GenerationBegan, LeaveAsked, Left, Waiting

NAMESPACE = "ebbtide"
_WAITING_REPEAT_S = 30.0


@dataclass(frozen=True)
class Standing:
    """The newest generation, as the controller has to know it."""

    attempt: int
    nodes: tuple[str, ...]
    began_s: float
    has_left: bool


class Desk:
    """``first_attempt`` is the number of attempts that earlier drivers of the run made."""

    def __init__(self, first_attempt: int = 0) -> None:
        self._next_attempt = first_attempt
        self._standing: Standing | None = None
        self._leave: str | None = None
        self._held: tuple[str, ...] = ()
        self._waited_s = 0.0
        self._waited_for: tuple[int, int] | None = None
        self._events: list[Event] = []
        self._runtime_env = "{}"

    # -- ranks -----------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], runtime_env: str = "{}") -> int:
        """A generation's ranks are up, on these nodes: its attempt number. By rank 0.

        ``runtime_env`` is Ray's text of the ranks' environment.
        """
        self._runtime_env = runtime_env
        attempt, self._next_attempt = self._next_attempt, self._next_attempt + 1
        now_s = time.time()
        self._standing = Standing(attempt, tuple(nodes), now_s, has_left=False)
        self._leave = None
        self._waited_for = None
        self._events.append(
            GenerationBegan(
                time_s=now_s, attempt=attempt, world_size=len(nodes), nodes=tuple(nodes)
            )
        )
        return attempt

    def reason_to_leave(self, attempt: int) -> str | None:
        """Why this generation should save and leave, or None. By rank 0, often."""
        current = self._standing is not None and self._standing.attempt == attempt
        return self._leave if current else None

    def left(self, attempt: int, step: int) -> None:
        """This generation has saved after ``step`` steps and waits to be ended. By rank 0."""
        standing = self._standing
        if standing is not None and standing.attempt == attempt:
            self._standing = Standing(attempt, standing.nodes, standing.began_s, has_left=True)
            self._events.append(Left(time_s=time.time(), attempt=attempt, step=step))

    def post(self, event: Event) -> None:
        """Something has happened."""
        self._events.append(event)

    # -- controller ------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """The newest generation."""
        return self._standing

    def ask_to_leave(self, attempt: int, reason: str) -> None:
        """Ask a generation to save and leave. Asking again changes nothing."""
        current = self._standing is not None and self._standing.attempt == attempt
        if current and self._leave is None:
            self._leave = reason
            self._events.append(LeaveAsked(time_s=time.time(), attempt=attempt, reason=reason))

    def hold(self, nodes: Sequence[str]) -> None:
        """The nodes that the run has at present."""
        self._held = tuple(nodes)

    def waiting(self, needs: int, has: int) -> None:
        """The run cannot (re)start: it needs more workers than it has."""
        now_s = time.time()
        if (needs, has) != self._waited_for or now_s - self._waited_s >= _WAITING_REPEAT_S:
            self._waited_s, self._waited_for = now_s, (needs, has)
            self._events.append(Waiting(time_s=now_s, needs=needs, has=has))

    # -- driver ----------------------------------------------------------------------------------

    def runtime_env(self) -> str:
        """Ray's text of the environment of the newest generation's ranks."""
        return self._runtime_env

    def take(self) -> tuple[list[Event], tuple[str, ...]]:
        """The events since the last call, and the nodes that the run has."""
        events, self._events = self._events, []
        return events, self._held


def actor_name(run_uri: str) -> str:
    """The desk's actor name: one for a run, whatever characters its URI has."""
    return f"run-{hashlib.sha256(run_uri.encode()).hexdigest()[:24]}"


def open_desk(run_uri: str, first_attempt: int) -> Any:
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
        desk = ray.remote(Desk).options(**options).remote(first_attempt)
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
