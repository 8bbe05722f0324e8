"""The driver's side of a run while it goes: carries what happens to storage, ledger and person."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ebbtide.platform.budget import Books
from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import BudgetError, ClusterError
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.metrics import Sample
from ebbtide.platform.ray_seam.state import draining_nodes
from ebbtide.platform.ray_seam.workers import prestart_workers
from ebbtide.train.bookkeeping import Bookkeeping, ClusterNode
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import (
    Event,
    EventLog,
    Failed,
    GenerationBegan,
    LeaveAsked,
    Left,
    MarketChange,
    NodeLost,
    Notice,
    Remark,
    Skipped,
    Straggler,
    Validation,
    Waiting,
)
from ebbtide.train.failures import Cause
from ebbtide.train.history import History
from ebbtide.train.spending import Guard
from ebbtide.train.telemetry import Telemetry, of_budget, of_nodes

logger = logging.getLogger(__name__)

_NODES_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Progress:
    """Where the run is. ``usd`` is what it has cost so far, with a price known for all or some.

    ``budget`` is what it has cost since its first start against its limit, for a person.
    """

    step: int
    steps: int
    loss: float
    tokens_per_s: float | None
    world_size: int
    attempt: int
    usd: Decimal | None
    usd_partial: bool
    budget: str | None = None


class Driver:
    """``tick`` is called about twice a second; it never waits for storage."""

    def __init__(
        self,
        config: TrainConfig,
        desk: Any,
        log: EventLog,
        ledger: LedgerWriter,
        books: Bookkeeping,
        guard: Guard,
        history: History,
        clock: Clock,
        on_progress: Callable[[Progress], None] | None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._config, self._desk, self._clock = config, desk, clock
        self._log, self._ledger, self._books, self.history = log, ledger, books, history
        self._guard, self._telemetry = guard, telemetry
        self._on_progress = on_progress
        self._started_s = clock.monotonic()
        self._held: Sequence[str] = ()
        self._nodes_s = float("-inf")
        self._began, self._holds, self._market_waits = False, False, False
        self._warm: set[str] = set()
        self._slots: dict[str, int] = {}
        self._waiting: Waiting | None = None
        self.failed: Failed | None = None

    def tick(self) -> None:
        """Take what has happened.

        Raises ClusterError if the run has too long had too few nodes, and BudgetError when it has
        been stopped by its budget, and saved.
        """
        import ray

        events, held = ray.get(self._desk.take.remote())
        self._record(events)
        if held != self._held or self._clock.monotonic() - self._nodes_s >= _NODES_INTERVAL_S:
            self._held, self._nodes_s = held, self._clock.monotonic()
            draining = draining_nodes()
            self._see_nodes(held, draining.keys())
            self._keep_warm(set(held) - draining.keys())
        if self._on_progress is not None and any(event.kind == "step" for event in events):
            self._on_progress(self.progress())
        if self._telemetry is not None and self._telemetry.is_due:
            self._telemetry.publish(self._samples(self._telemetry))
        self._keep_budget()
        self._require_start()

    def _samples(self, telemetry: Telemetry) -> Iterator[Sample]:
        yield from telemetry.figures.samples(self.history, self._config.steps)
        yield from of_nodes(self._books.nodes, self._books.usd_per_hour)
        yield from of_budget(self._guard.shares(self._account()))

    def progress(self) -> Progress:
        """Where the run is; there must have been a step."""
        last = self.history.last
        assert last is not None
        usd, partial = self._books.usd(self._clock.time()), self._books.partial
        return Progress(
            step=last.step,
            steps=self._config.steps,
            loss=last.loss,
            tokens_per_s=self.history.tokens_per_s,
            world_size=self.history.attempts[-1].world_size,
            attempt=last.attempt,
            usd=None if partial and not usd else usd,
            usd_partial=partial,
            budget=self._guard.so_far(self._account()),
        )

    def _account(self) -> Books:
        now_s = self._clock.time()
        books = self._books
        return self._guard.books(now_s, books.usd(now_s), books.usd_per_hour, books.market_usd)

    def _keep_budget(self) -> None:
        act = self._guard.decide(self._account(), self._books.unpriced)
        for caution in act.cautions:
            logger.warning("budget: %s", caution.text)
        if act.hold is not None:
            if act.hold != self._holds:
                logger.warning("budget: %s", act.reason or "prices have come down; going on")
            self._holds = act.hold
            self._desk.wait_until.remote(math.inf if act.hold else 0.0)
        if act.leave is not None:
            self._desk.ask_to_leave.remote(act.leave, f"budget: {act.reason}")
        if act.end:
            raise BudgetError(
                f"{self._config.run_uri}: stopped: {act.reason}. The run is saved at step "
                f"{self._guard.saved_step} of {self._config.steps}; change the job's budget and "
                "submit it again to go on from there"
            )

    def _record(self, events: Sequence[Event]) -> None:
        self._log.write(events)
        self.history.add(events)
        if self._telemetry is not None:
            self._telemetry.figures.follow(events)
        for record in self._books.follow(events):
            self._ledger.write(record)
        self._guard.follow(events, self._books.usd)
        for event in events:
            self._tell(event)

    def _see_nodes(self, held: Sequence[str], draining: AbstractSet[str]) -> None:
        import ray

        alive = {
            node["NodeID"]: ClusterNode(node["NodeID"], node.get("Labels") or {})
            for node in ray.nodes()
            if node["Alive"]
        }
        records, events = self._books.see(held, alive, draining, self._clock.time())
        for record in (*records, *self._books.reprice(self._clock.time())):
            self._ledger.write(record)
        self._record(events)

    def _keep_warm(self, nodes: AbstractSet[str]) -> None:
        """Once steps are made, have each node hold as many idle processes as it may get ranks.

        A node that is alone is not restarted from when it is lost.
        """
        import ray

        attempts = self.history.attempts
        if len(nodes) < 2 or not attempts or attempts[-1].first_step is None:
            return
        for node in nodes - self._warm:
            self._warm.add(node)
            environment = ray.get(self._desk.runtime_env.remote())
            try:
                prestart_workers(node, self._ranks_on(node), environment)
            except ClusterError as error:
                logger.info("%s", error)

    def _ranks_on(self, node: str) -> int:
        """How many ranks a node gets at most, as far as is known."""
        return self._slots.get(node, max(self._slots.values(), default=1))

    def _require_start(self) -> None:
        limit_s = self._config.workers.start_timeout_s
        if self._guard.paused or self._market_waits:
            self._started_s = self._clock.monotonic()
        if self._began or self._clock.monotonic() - self._started_s < limit_s:
            return
        has = self._waiting.has if self._waiting else 0
        raise ClusterError(
            f"the job needs {self._config.workers.min} workers, the cluster has room for {has}, "
            f"and workers.start_timeout_s ({limit_s:g} s) has passed; add nodes, or lower "
            "workers.min"
        )

    def _tell(self, event: Event) -> None:
        match event:
            case GenerationBegan():
                self._began = True
                self._warm.clear()
                self._slots |= Counter(event.nodes)
                logger.info("attempt %d begins, world size %d", event.attempt, event.world_size)
            case Waiting():
                self._waiting = event
                logger.warning(
                    "the job needs %d workers, the cluster has room for %d; waiting",
                    event.needs,
                    event.has,
                )
            case Notice():
                logger.warning("notice: node %s will be taken away", event.node[:8])
            case NodeLost():
                logger.warning("node %s is gone", event.node[:8])
            case LeaveAsked():
                logger.info(
                    "attempt %d is asked to save and leave: %s", event.attempt, event.reason
                )
            case Left():
                logger.info(
                    "attempt %d has saved and left after step %d", event.attempt, event.step
                )
            case Failed():
                self.failed = event
                is_lost = event.cause == Cause.NODE_LOST  # the rest is its peers' noise
                why = event.cause if is_lost else f"{event.cause}: {event.message}"
                logger.warning("attempt %d ended, %s", event.attempt, why)
            case Skipped():
                logger.warning("the batch of step %d is left out from now on", event.step)
            case Straggler():
                logger.warning(
                    "rank %d on node %s is a straggler: it works %.1f times as long as the median",
                    event.rank,
                    event.node[:8],
                    event.ratio,
                )
            case MarketChange():
                self._market_waits = event.market is None
                where = " ".join(filter(None, (event.market, event.zone))) or "nowhere, for now"
                logger.info("market: nodes are wanted %s: %s", where, event.reason)
            case Remark():
                logger.info("attempt %d: %s", event.attempt, event.text)
            case Validation():
                logger.info("step %d: validation loss %.4f", event.step, event.loss)
            case _:
                pass
