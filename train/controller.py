"""The run's side in Ray Train's controller: it asks the pure rules and tells the desk.

One of each is built by the driver and travels into the controller's actor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ebbtide.platform.nodes import LABEL_NODE_ID
from ebbtide.platform.ray_seam.decisions import NodeOffer
from ebbtide.platform.ray_seam.state import unreachable_nodes
from ebbtide.train import elastic
from ebbtide.train.desk import Standing, find_desk
from ebbtide.train.elastic import GROWTH_GAIN, Limits, Offer, Running, Wish
from ebbtide.train.events import Failed, Skipped
from ebbtide.train.failures import Failure, Released, classify
from ebbtide.train.retries import Retries, Verdict


class Scaling:
    """Answers the controller's questions how many workers there should be, and where."""

    def __init__(self, run_uri: str, limits: Limits, has_market: bool = False) -> None:
        self._run_uri, self._limits, self._has_market = run_uri, limits, has_market
        self._wish: Wish | None = None
        self._more_since_s: float | None = None
        self._elsewhere: tuple[int, float] | None = None
        self._noticed_s: float | None = None
        self._ended_attempt: int | None = None
        self._has_asked = False
        self._first_seen_s: dict[str, float] = {}
        self._offers: Sequence[Offer] = ()
        self._in_use: Sequence[str] = ()
        self._placed: int | None = None
        self._is_held = False
        self._handle: Any = None

    def to_start(self, nodes: Sequence[NodeOffer]) -> int | None:
        """The number of workers to start with; None to wait. No generation is running."""
        import ray

        offers = self._see(nodes)
        self._tell(offers, ())
        self._more_since_s, self._noticed_s, self._elsewhere = None, None, None
        self._has_asked = False
        not_before_s = ray.get(self._desk().not_before.remote())
        self._is_held = not_before_s == math.inf or self._waits
        if self._is_held or time.time() < not_before_s:
            return None
        self._offers = offers = elastic.offers_of_market(offers, self._limits)
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
        reason = reason or self._move(offers, running, now_s)
        reason = reason or self._growth(standing.attempt, offers, running, now_s)
        if reason is not None:
            self._has_asked = True
            self._desk().ask_to_leave.remote(standing.attempt, reason)
        return None

    def to_place(self, workers: int) -> Sequence[str]:
        """The workers' nodes; none if they were named before, and the generation did not start.

        So what Ray and the rules see differently costs one try.
        """
        import ray

        before, next_attempt = ray.get(self._desk().placed.remote())
        if next_attempt == self._placed:
            return []
        self._placed = next_attempt
        return elastic.place(self._offers, before, workers)

    def to_request(self, nodes: Sequence[NodeOffer]) -> Sequence[Mapping[str, str]]:
        """The workers to ask the cluster for, with the labels of their nodes; none while the run is
        held. What runs elsewhere than the market wants it is asked for until it has moved."""
        if self._is_held or self._waits:
            return []
        offers = _offers(nodes, (), self._wish)
        labels = self._wish.labels or {} if self._wish is not None else {}
        here = [offer for offer in offers if offer.wanted]
        wanted = [labels] * (self._limits.most + elastic.hidden_workers(here))
        elsewhere = {offer.node_id for offer in offers if not offer.wanted}
        kept = [{LABEL_NODE_ID: node} for node in self._in_use if node in elsewhere]  # by rank
        return [*wanted, *kept]

    def has_left(self) -> bool:
        """Whether the running generation was asked to save and leave, and has."""
        import ray

        if not self._has_asked:
            return False
        standing: Standing | None = ray.get(self._desk().standing.remote())
        return standing is not None and standing.running.has_left

    @property
    def _waits(self) -> bool:
        """Whether the market wants no nodes for now, or has not decided yet."""
        return self._has_market and (self._wish is None or self._wish.labels is None)

    def _see(self, nodes: Sequence[NodeOffer]) -> Sequence[Offer]:
        import ray

        if self._has_market:
            self._wish = ray.get(self._desk().wish.remote())
            self._in_use = ray.get(self._desk().placed.remote())[0]
        now_s = time.monotonic()
        self._first_seen_s = {
            node.node_id: self._first_seen_s.get(node.node_id, now_s) for node in nodes
        }
        old = {
            node
            for node, seen_s in self._first_seen_s.items()
            if now_s - seen_s >= elastic.WARM_PATIENCE_S
        }
        self._offers = _offers(nodes, old, self._wish)
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

    def _move(self, offers: Sequence[Offer], running: Running, now_s: float) -> str | None:
        """Why to leave for where the market wants the run, if it is time to."""
        wish = self._wish
        if wish is None:
            return None
        if wish.labels is None:
            return f"market: {wish.reason}"
        strangers = {offer.node_id for offer in offers if not offer.wanted}
        if not strangers.intersection(running.nodes):
            self._elsewhere = None
            return None
        wanted = [offer for offer in offers if offer.wanted]
        possible = elastic.possible_workers(wanted, self._limits)
        if self._elsewhere is None or self._elsewhere[0] != possible:
            self._elsewhere = possible, now_s
        if elastic.move_is_due(offers, running, self._limits, now_s, self._elsewhere[1]):
            return f"market: {wish.reason}"
        return None

    def _growth(
        self, attempt: int, offers: Sequence[Offer], running: Running, now_s: float
    ) -> str | None:
        if self._elsewhere is not None:
            return None  # it is to move
        offers = [offer for offer in offers if offer.wanted]
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
        strangers = {offer.node_id for offer in offers if not offer.wanted}
        full = len(in_use) >= self._limits.most and not strangers.intersection(in_use)
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

        if any(isinstance(error, Released) for error in errors.values()):
            return True  # the run has saved and waits
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


def _offers(
    nodes: Sequence[NodeOffer], old: Collection[str], wish: Wish | None = None
) -> list[Offer]:
    return [
        Offer(
            node.node_id,
            node.workers,
            node.draining,
            node.reachable,
            node.deadline_s,
            warm=node.warm or node.node_id in old,
            wanted=wish is None or wish.fits(node.labels),
        )
        for node in nodes
    ]
