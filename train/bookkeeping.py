"""What the driver knows of the run's nodes and attempts, as records of the ledger.

Pure: it is told what is and answers with records; prices are looked up once, when a node comes. A
node belongs to the run from when it is held for it until it is gone, or given back. An attempt
starts where the one before it ended, so that the time in between is the new attempt's restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal

from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET, LABEL_ZONE
from ebbtide.platform.price_feed import Prices
from ebbtide.platform.prices import Market
from ebbtide.platform.records import (
    Attempt,
    Epoch,
    NodeDown,
    NodeUp,
    Record,
    SaveMissed,
    Transfer,
)
from ebbtide.train.config import CostConfig
from ebbtide.train.events import (
    Checkpoint,
    CheckpointMissed,
    Event,
    Failed,
    GenerationBegan,
    Left,
    NodeLost,
    Notice,
    Step,
)


@dataclass(frozen=True)
class ClusterNode:
    """A live node of the cluster, with its labels."""

    node_id: str
    labels: Mapping[str, str]


def terms(node: ClusterNode, now_s: float, cost: CostConfig, prices: Prices) -> NodeUp:
    """What a node is and costs: by its labels, else by the job's ``cost``."""
    kind = node.labels.get(LABEL_INSTANCE_TYPE, cost.instance_type)
    label = node.labels.get(LABEL_MARKET)
    market = Market(label if label in set(Market) else cost.market)
    zone = node.labels.get(LABEL_ZONE)
    return NodeUp(
        node_id=node.node_id,
        time_s=now_s,
        instance_type=kind,
        market=market,
        zone=zone,
        usd_per_hour=prices.price(kind, market, zone),
        usd_per_hour_on_demand=prices.price(kind, Market.ON_DEMAND, zone),
    )


def describe(node: NodeUp) -> str:
    """A node, for a person who wonders about its price."""
    kind = node.instance_type or "unknown type"
    return f"node {node.node_id[:8]} ({kind}, {node.market.value})"


class Bookkeeping:
    """The records of one driver. ``first_step``: steps in the checkpoint it starts from."""

    def __init__(self, cost: CostConfig, prices: Prices, started_s: float, first_step: int) -> None:
        self._cost, self._prices = cost, prices
        self._up: dict[str, NodeUp] = {}
        self._had: dict[str, ClusterNode] = {}
        self._spent = Decimal(0)
        self._partial = False
        self._saved_step = first_step
        self._ended_s = started_s
        self._epoch: int | None = None
        self._opened: tuple[int, float] | None = None
        self._in_use: tuple[str, ...] = ()
        self._before: tuple[str, ...] = ()
        self._lost: set[str] = set()
        self._announced: set[str] = set()

    # -- attempts --------------------------------------------------------------------------------

    def follow(self, events: Iterable[Event]) -> list[Record]:
        """Records of what these events mean."""
        return [record for event in events for record in self._follow(event)]

    def _follow(self, event: Event) -> Sequence[Record]:
        match event:
            case GenerationBegan():
                unwritten = self._attempt(self._saved_step)
                self._opened = (event.attempt, self._ended_s)
                self._before, self._in_use = self._in_use, event.nodes
                return unwritten
            case Step():
                since_s, self._ended_s = self._ended_s, event.time_s
                return [*self._attempt(event.step - 1), *self._epoch_of(event, since_s)]
            case Checkpoint():
                self._saved_step = event.step
                return self._egress(event)
            case CheckpointMissed():
                return [
                    SaveMissed(
                        time_s=event.time_s, attempt=event.attempt, step=event.step, why=event.why
                    )
                ]
            case Left():
                self._ended_s = event.time_s
            case Failed():
                return self._attempt(self._saved_step)
            case Notice():
                self._announced.add(event.node)
            case _:
                pass
        return []

    def _epoch_of(self, step: Step, since_s: float) -> list[Record]:
        if step.epoch == self._epoch:
            return []
        self._epoch = step.epoch
        return [Epoch(index=step.epoch, start_s=since_s)]

    def _egress(self, save: Checkpoint) -> list[Record]:
        usd_per_gb = self._cost.egress_usd_per_gb
        if not usd_per_gb or not save.size_bytes:
            return []
        self._spent += save.size_bytes * usd_per_gb / 10**9
        return [
            Transfer(
                time_s=save.time_s,
                attempt=save.attempt,
                size_bytes=save.size_bytes,
                usd_per_gb=usd_per_gb,
            )
        ]

    def _attempt(self, first_step: int) -> list[Record]:
        if self._opened is None:
            return []
        (index, start_s), self._opened = self._opened, None
        return [Attempt(index=index, start_s=start_s, first_step=first_step)]

    # -- nodes -----------------------------------------------------------------------------------

    def see(
        self,
        held: Iterable[str],
        alive: Mapping[str, ClusterNode],
        draining: AbstractSet[str],
        now_s: float,
    ) -> tuple[list[Record], list[Event]]:
        """Records and events of the nodes that came or went since the last call.

        ``draining``: nodes whose end is announced. They stay the run's.
        """
        held = set(held)
        records: list[Record] = []
        kept = alive.keys() & (held | draining)
        for node_id in sorted(self._up.keys() - kept):
            records.append(NodeDown(node_id=node_id, time_s=now_s))
            self._spent += _usd(self._up.pop(node_id), now_s)
        for node_id in sorted((held & alive.keys()) - self._up.keys()):
            records.append(self._take(alive[node_id], now_s))
        if self._up:
            self._had = {node_id: alive[node_id] for node_id in self._up if node_id in alive}
        return records, self._gone(alive.keys(), now_s)

    def _take(self, node: ClusterNode, now_s: float) -> NodeUp:
        up = terms(node, now_s, self._cost, self._prices)
        self._up[node.node_id] = up
        self._partial |= up.usd_per_hour is None
        return up

    def reprice(self, now_s: float) -> list[Record]:
        """Records of the nodes whose price has changed; what they cost before stays."""
        records: list[Record] = []
        for node_id, node in self._had.items():
            before = self._up.get(node_id)
            if before is None:
                continue
            now = terms(node, now_s, self._cost, self._prices)
            if now.model_copy(update={"time_s": before.time_s}) != before:
                self._spent += _usd(before, now_s)
                records.append(self._take(node, now_s))
        return records

    def _gone(self, alive: AbstractSet[str], now_s: float) -> list[Event]:
        """The cluster may know only when the next generation is at work without the node."""
        gone = {*self._in_use, *self._before} - alive - self._lost
        self._lost |= gone
        return [
            NodeLost(time_s=now_s, node=node, announced=node in self._announced)
            for node in sorted(gone)
        ]

    def end(self, now_s: float) -> None:
        """The ledger ends here: nothing costs any more, however late it is asked for."""
        self._spent = self.usd(now_s)
        self._up.clear()

    def usd(self, now_s: float) -> Decimal:
        """Dollars so far of this driver, for the nodes with a known price, and egress."""
        return self._spent + sum((_usd(node, now_s) for node in self._up.values()), Decimal(0))

    @property
    def nodes(self) -> Collection[NodeUp]:
        """The nodes that the run has, on their present terms."""
        return self._up.values()

    @property
    def usd_per_hour(self) -> Decimal:
        """What the run's nodes cost an hour, for those with a known price."""
        return sum((node.usd_per_hour or Decimal(0) for node in self._up.values()), Decimal(0))

    @property
    def market_usd(self) -> Decimal:
        """What the nodes that the run has, or had last, cost an hour now."""
        now = (terms(node, 0.0, self._cost, self._prices) for node in self._had.values())
        return sum((node.usd_per_hour or Decimal(0) for node in now), Decimal(0))

    @property
    def unpriced(self) -> str | None:
        """A node of the run whose price is not known, for a person; or None."""
        return next((describe(n) for n in self._up.values() if n.usd_per_hour is None), None)

    @property
    def partial(self) -> bool:
        """Whether a node without a known price was used."""
        return self._partial


def _usd(node: NodeUp, now_s: float) -> Decimal:
    hours = Decimal(max(0.0, now_s - node.time_s)) / 3600
    return hours * (node.usd_per_hour or Decimal(0))
