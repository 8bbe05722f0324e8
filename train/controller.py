"""The run's side in Ray Train's controller: it asks the pure rules and tells the desk.

One of each is built by the driver and travels into the controller's actor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.platform.ray_seam import NodeOffer, unreachable_nodes
from ebbtide.train import elastic
from ebbtide.train.desk import Standing, find_desk
from ebbtide.train.elastic import Limits, Offer, Running
from ebbtide.train.events import Failed
from ebbtide.train.failures import Cause, Failure, classify


class Scaling:
    """Answers the controller's question how many workers there should be."""

    def __init__(self, run_uri: str, limits: Limits) -> None:
        self._run_uri, self._limits = run_uri, limits
        self._more_since_s: float | None = None
        self._ended_attempt: int | None = None
        self._handle: Any = None

    def to_start(self, nodes: Sequence[NodeOffer]) -> int | None:
        """The number of workers to start with; None to wait. No generation is running."""
        offers = _offers(nodes)
        self._hold(offers, ())
        workers = elastic.workers_to_start(offers, self._limits)
        if workers is None:
            has = elastic.possible_workers(offers, self._limits)
            self._desk().waiting.remote(self._limits.fewest, has)
        return workers

    def to_resize(self, nodes: Sequence[NodeOffer]) -> int | None:
        """The number of workers to go on with; None to leave the running generation alone."""
        import ray

        standing: Standing | None = ray.get(self._desk().standing.remote())
        if standing is None or standing.attempt == self._ended_attempt:
            return None  # the ranks are not up yet
        running = Running(standing.nodes, standing.began_s, standing.has_left)
        offers = _offers(nodes)
        if running.has_left:
            workers = self.to_start(nodes)
            if workers is not None:
                self._ended_attempt, self._more_since_s = standing.attempt, None
            return workers
        self._hold(offers, running.nodes)
        now_s = time.time()
        if elastic.possible_workers(offers, self._limits) <= running.world_size:
            self._more_since_s = None
        elif self._more_since_s is None:
            self._more_since_s = now_s
        reason = elastic.reason_to_leave(offers, running, self._limits, now_s, self._more_since_s)
        if reason is not None:
            self._desk().ask_to_leave.remote(standing.attempt, reason)
        return None

    def to_request(self, nodes: Sequence[NodeOffer]) -> int:
        """How many workers' worth of nodes to ask the cluster for."""
        return self._limits.most + elastic.hidden_workers(_offers(nodes))

    def _hold(self, offers: Sequence[Offer], in_use: Sequence[str]) -> None:
        full = len(in_use) >= self._limits.most
        offered = [] if full else [offer.node_id for offer in offers]
        self._desk().hold.remote(sorted({*in_use, *offered}))

    def _desk(self) -> Any:
        if self._handle is None:
            self._handle = find_desk(self._run_uri)
        return self._handle


class Judge:
    """Answers the controller's question whether to go on after a failure."""

    def __init__(self, run_uri: str, max_failures: int) -> None:
        self._run_uri, self._left = run_uri, max_failures

    def go_on(self, errors: Mapping[int, Exception]) -> bool:
        """Whether the run restarts after these ranks failed; the desk is told either way."""
        import ray

        desk = find_desk(self._run_uri)
        standing: Standing | None = ray.get(desk.standing.remote())
        nodes = standing.nodes if standing is not None else ()
        failure = classify(errors, node_is_lost=bool(unreachable_nodes(nodes)))
        counted = failure.cause is Cause.CRASH
        self._left -= counted
        attempt = standing.attempt if standing is not None else 0
        ray.get(desk.post.remote(_event(failure, attempt, counted)))
        return failure.cause is not Cause.FINAL and self._left >= 0


def _event(failure: Failure, attempt: int, counted: bool) -> Failed:
    return Failed(
        time_s=time.time(),
        attempt=attempt,
        cause=failure.cause.value,
        message=failure.message,
        counted=counted,
    )


def _offers(nodes: Sequence[NodeOffer]) -> list[Offer]:
    return [Offer(node.node_id, node.workers, node.draining, node.reachable) for node in nodes]
