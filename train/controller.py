"""The run's side in Ray Train's controller: it asks the pure rules and tells the desk.

One of each is built by the driver and travels into the controller's actor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ebbtide.platform.ray_seam.decisions import NodeOffer
from ebbtide.platform.ray_seam.state import unreachable_nodes
from ebbtide.train import elastic
from ebbtide.train.desk import Standing, find_desk
from ebbtide.train.elastic import GROWTH_GAIN, Limits, Offer, Running
from ebbtide.train.events import Failed, Skipped
from ebbtide.train.failures import Failure, classify
from ebbtide.train.retries import Retries, Verdict


class Scaling:
    """Answers the controller's questions how many workers there should be, and where."""

    def __init__(self, run_uri: str, limits: Limits) -> None:
        self._run_uri, self._limits = run_uri, limits
        self._more_since_s: float | None = None
        self._noticed_s: float | None = None
        self._ended_attempt: int | None = None
        self._first_seen_s: dict[str, float] = {}
        self._offers: Sequence[Offer] = ()
        self._placed: int | None = None
        self._is_held = False
        self._handle: Any = None

    def to_start(self, nodes: Sequence[NodeOffer]) -> int | None:
        """The number of workers to start with; None to wait. No generation is running."""
        import ray

        offers = self._see(nodes)
        self._tell(offers, ())
        self._more_since_s, self._noticed_s = None, None
        not_before_s = ray.get(self._desk().not_before.remote())
        self._is_held = not_before_s == math.inf
        if time.time() < not_before_s:
            return None
        standing: Standing | None = ray.get(self._desk().standing.remote())
        if standing is not None:
            offers = elastic.offers_to_start(offers, standing.running.nodes, self._limits)
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
        running, offers, now_s = standing.running, self._see(nodes), time.time()
        if running.has_left:
            workers = self.to_start(nodes)
            if workers is not None:
                self._ended_attempt = standing.attempt
            return workers
        self._tell(offers, running.nodes)
        reason = self._notice(standing.attempt, offers, running, now_s)
        reason = reason or self._growth(standing.attempt, offers, running, now_s)
        if reason is not None:
            self._desk().ask_to_leave.remote(standing.attempt, reason)
        return None

    def to_place(self, workers: int) -> Sequence[str]:
        """The nodes for the next generation; none if they were named before, and it did not start.

        So what Ray and the rules see differently costs one try.
        """
        import ray

        before, next_attempt = ray.get(self._desk().placed.remote())
        if next_attempt == self._placed:
            return []
        self._placed = next_attempt
        return elastic.place(self._offers, before, workers)

    def to_request(self, nodes: Sequence[NodeOffer]) -> int:
        """How many workers' worth of nodes to ask the cluster for; none while the run is held."""
        if self._is_held:
            return 0
        return self._limits.most + elastic.hidden_workers(_offers(nodes, ()))

    def _see(self, nodes: Sequence[NodeOffer]) -> Sequence[Offer]:
        now_s = time.monotonic()
        self._first_seen_s = {
            node.node_id: self._first_seen_s.get(node.node_id, now_s) for node in nodes
        }
        old = {
            node
            for node, seen_s in self._first_seen_s.items()
            if now_s - seen_s >= elastic.WARM_PATIENCE_S
        }
        self._offers = _offers(nodes, old)
        return self._offers

    def _notice(
        self, attempt: int, offers: Sequence[Offer], running: Running, now_s: float
    ) -> str | None:
        going = elastic.noticed(offers, running)
        if not going:
            self._noticed_s = None
            return None
        if self._noticed_s is None:
            self._noticed_s = now_s
        if late := elastic.too_late(going, running, now_s):
            self._desk().remark.remote(
                attempt,
                f"notice: {_short(late)} will be gone before a save could be complete; "
                "the run goes on as long as it can, and then from its newest checkpoint",
            )
            return None
        if not elastic.notice_is_due(going, running, now_s, self._noticed_s):
            return None
        return f"notice: {_short(going)} will be taken away"

    def _growth(
        self, attempt: int, offers: Sequence[Offer], running: Running, now_s: float
    ) -> str | None:
        possible = elastic.possible_workers(offers, self._limits)
        if possible <= running.world_size:
            self._more_since_s = None
            return None
        if self._more_since_s is None:
            self._more_since_s = now_s
        ready = elastic.ready_offers(offers, running.nodes)
        if elastic.possible_workers(ready, self._limits) < possible:
            return None  # one restart for all that come
        is_most = possible == self._limits.most
        if not elastic.growth_is_due(running, now_s, self._more_since_s, is_most=is_most):
            return None
        gain = elastic.growth_gain(running, possible, self._limits)
        what = f"{possible} workers are possible, {running.world_size} run"
        if gain >= GROWTH_GAIN:
            return f"growth: {what}; {gain:.2f} times the steps are expected"
        self._desk().remark.remote(
            attempt,
            f"no growth: {what}, but after the pause only {gain:.2f} times the steps are expected "
            f"({GROWTH_GAIN:.2f} are wanted)",
        )
        return None

    def _tell(self, offers: Sequence[Offer], in_use: Sequence[str]) -> None:
        """Let the desk know which nodes the run has, and which of them are announced to go."""
        full = len(in_use) >= self._limits.most
        offered = {offer.node_id for offer in offers if offer.workers}
        held = {*in_use} if full else {*in_use, *offered}
        self._desk().hold.remote(sorted(held))
        going = {
            offer.node_id: offer.deadline_s
            for offer in offers
            if offer.draining and offer.node_id in {*in_use, *offered}
        }
        if going:
            self._desk().announce.remote(going)

    def _desk(self) -> Any:
        if self._handle is None:
            self._handle = find_desk(self._run_uri)
        return self._handle


class Judge:
    """Answers the controller's question whether to go on after a failure."""

    def __init__(self, run_uri: str, max_failures: int, skip_bad_batch: bool = False) -> None:
        self._run_uri = run_uri
        self._retries = Retries(max_failures, skip_bad_batch)

    def go_on(self, errors: Mapping[int, Exception]) -> bool:
        """Whether the run restarts after these ranks failed; the desk is told either way."""
        import ray

        desk = find_desk(self._run_uri)
        standing: Standing | None = ray.get(desk.standing.remote())
        nodes = standing.running.nodes if standing is not None else ()
        step = standing.running.step if standing is not None else 0
        attempt = standing.attempt if standing is not None else 0
        failure = classify(errors, node_is_lost=bool(unreachable_nodes(nodes)))
        skipped = ray.get(desk.skipped.remote())
        verdict = self._retries.judge(failure, step, skipped)
        now_s = time.time()
        ray.get(desk.post.remote(_event(failure, attempt, verdict, now_s)))
        if verdict.skip is not None:
            ray.get(desk.post.remote(Skipped(time_s=now_s, attempt=attempt, step=verdict.skip)))
        if verdict.wait_s:
            ray.get(desk.wait_until.remote(now_s + verdict.wait_s))
        return verdict.go_on


def _event(failure: Failure, attempt: int, verdict: Verdict, now_s: float) -> Failed:
    return Failed(
        time_s=now_s,
        attempt=attempt,
        cause=failure.cause.value,
        message=failure.message,
        counted=verdict.counted,
    )


def _short(nodes: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(node[:8] for node in nodes)


def _offers(nodes: Sequence[NodeOffer], old: Collection[str]) -> list[Offer]:
    return [
        Offer(
            node.node_id,
            node.workers,
            node.draining,
            node.reachable,
            node.deadline_s,
            warm=node.warm or node.node_id in old,
        )
        for node in nodes
    ]
