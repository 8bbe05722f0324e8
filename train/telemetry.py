"""A run's figures for Prometheus, while it goes: from its events, its books and its ledger.

Promises: neither a step nor the driver waits for it; the node-seconds and dollars by owner are
those of ``ebbtide cost``; reading the ledger takes at most a twentieth of one core.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from ebbtide.platform.account import Account, account
from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import CostError, EbbtideError
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.metrics import Publisher, Sample
from ebbtide.platform.records import NodeUp
from ebbtide.platform.storage import Storage
from ebbtide.train.events import (
    Checkpoint,
    Event,
    Failed,
    NodeLost,
    Notice,
    Validation,
)
from ebbtide.train.failures import Cause
from ebbtide.train.history import History

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
"""Between two times that everything is set: a fraction of what Ray takes to forget it."""

_FIRST_READ_S, _LEAST_READ_S = 2.0, 10.0
_SHARE = 20
"""The ledger is read again after so many times what reading it has taken."""


class Figures:
    """What the events say, beside what :class:`History` keeps. Pure."""

    def __init__(self) -> None:
        self._interruptions = Counter({"notice": 0, "kill": 0, "failure": 0})
        self._checkpoint: Checkpoint | None = None
        self._validation: Validation | None = None

    def follow(self, events: Iterable[Event]) -> None:
        """Take events into account, the run's earlier ones first."""
        for event in events:
            match event:
                case Notice():
                    self._interruptions["notice"] += 1
                case NodeLost() if not event.announced:
                    self._interruptions["kill"] += 1
                case Failed() if event.cause != Cause.NODE_LOST:
                    self._interruptions["failure"] += 1
                case Checkpoint():
                    self._checkpoint = event
                case Validation():
                    self._validation = event
                case _:
                    pass

    def samples(self, history: History, steps: int) -> Iterator[Sample]:
        """Everything that is known of the run's progress."""
        yield Sample("steps", steps)
        yield Sample("steps_lost", history.steps_lost())
        yield Sample("tokens", history.tokens)
        for kind, count in self._interruptions.items():
            yield Sample("interruptions", count, {"kind": kind})
        if history.attempts:
            newest = history.attempts[-1]
            yield Sample("world_size", newest.world_size if newest.ended is None else 0)
            yield Sample("attempt", newest.attempt)
        if (step := history.last) is not None:
            yield Sample("step", step.step)
            yield Sample("loss", step.loss)
            yield Sample("grad_norm", step.grad_norm)
            yield Sample("learning_rate", step.lr)
            for owner, seconds in step.seconds.items():
                yield Sample("step_seconds", seconds, {"owner": owner})
        if (rate := history.tokens_per_s) is not None:
            yield Sample("tokens_per_second", rate)
        if self._validation is not None:
            yield Sample("validation_loss", self._validation.loss)
        if (saved := self._checkpoint) is not None:
            yield Sample("checkpoint_step", saved.step)
            if saved.took_s is not None:
                yield Sample("checkpoint_seconds", saved.took_s)
            if saved.size_bytes is not None:
                yield Sample("checkpoint_bytes", saved.size_bytes)


def of_account(result: Account) -> Iterator[Sample]:
    """Where the seconds and the dollars went."""
    total = result.total
    for (owner, market), part in result.by(lambda row: (row.owner, row.node.market)).items():
        tags = {"owner": owner.value, "market": market.value}
        yield Sample("node_seconds", part.seconds, tags)
        if part.spent.usd is not None:
            yield Sample("dollars", float(part.spent.usd), tags)
    yield Sample("unpriced_node_seconds", total.spent.unpriced_us / 1e6)
    yield Sample("dollars_egress", float(result.egress_usd))
    if total.on_demand.usd is not None and not total.on_demand.partial:
        yield Sample("dollars_on_demand", float(total.on_demand.usd))
    if result.goodput is not None:
        yield Sample("goodput_ratio", result.goodput)


def of_nodes(nodes: Iterable[NodeUp], usd_per_hour: Decimal) -> Iterator[Sample]:
    """What the run has at present, and what it costs an hour."""
    found = Counter((n.market.value, n.zone or "", n.instance_type or "") for n in nodes)
    for (market, zone, kind), count in found.items():
        yield Sample("nodes", count, {"market": market, "zone": zone, "instance_type": kind})
    yield Sample("dollars_per_hour", float(usd_per_hour))


def of_budget(shares: Mapping[str, float]) -> Iterator[Sample]:
    """How much of each limit is used."""
    for limit, share in shares.items():
        yield Sample("budget_ratio", share, {"limit": limit})


class AccountWatch:
    """``with AccountWatch(run, clock) as watch:`` reads the run's ledger in the background."""

    def __init__(self, run: Storage, clock: Clock) -> None:
        self._run, self._clock = run, clock
        self.account: Account | None = None
        self._told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ebbtide-account", daemon=True)

    def __enter__(self) -> AccountWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()  # a read that is under way is not waited for

    def read(self) -> float:
        """Read the ledger; how many seconds to wait before the next time."""
        began_s = self._clock.monotonic()
        try:
            self.account = account(read_ledger(self._run).records, self._clock.time())
        except CostError:  # nothing is written yet
            pass
        except EbbtideError as error:  # the storage is away; the run goes on, and says so itself
            if not self._told:
                logger.info("the ledger cannot be read for the metrics: %s", error)
            self._told = True
        return max(_LEAST_READ_S, _SHARE * (self._clock.monotonic() - began_s))

    def _watch(self) -> None:
        wait_s = _FIRST_READ_S
        while not self._closed.wait(wait_s):
            wait_s = self.read()


class Telemetry:
    """Publishes a run's figures, of whose ``earlier`` events it is told at first."""

    def __init__(
        self, run: str, watch: AccountWatch, clock: Clock, earlier: Iterable[Event] = ()
    ) -> None:
        self._publisher, self._watch, self._clock = Publisher(run), watch, clock
        self.figures = Figures()
        self.figures.follow(earlier)
        self._published_s = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether it is time to :meth:`publish`."""
        return self._clock.monotonic() - self._published_s >= _INTERVAL_S

    def publish(self, samples: Iterable[Sample]) -> None:
        """Set these, and what the ledger says."""
        self._published_s = self._clock.monotonic()
        self._publisher.publish(samples)
        if self._watch.account is not None:
            self._publisher.publish(of_account(self._watch.account))
