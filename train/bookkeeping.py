"""What the driver knows of the run's nodes and attempts, as records of the ledger.

Pure: it is told what is and answers with records; prices are looked up once, when a node comes. A
node belongs to the run from when it is held for it until it is gone, or given back. An attempt
starts where the one before it ended, so that the time in between is the new attempt's restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal

from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET, LABEL_ZONE
from ebbtide.platform.prices import Catalogue, Market
from ebbtide.platform.records import Attempt, Epoch, NodeDown, NodeUp, Record, SaveMissed
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


def terms(node: ClusterNode, now_s: float, cost: CostConfig, catalogue: Catalogue) -> NodeUp:
    """What a node is and costs: by its labels, else by the job's ``cost``."""
    kind = node.labels.get(LABEL_INSTANCE_TYPE, cost.instance_type)
    label = node.labels.get(LABEL_MARKET)
    market = Market(label if label in set(Market) else cost.market)
    return NodeUp(
        node_id=node.node_id,
        time_s=now_s,
        instance_type=kind,
        market=market,
        zone=node.labels.get(LABEL_ZONE),
        usd_per_hour=catalogue.price(kind, market),
        usd_per_hour_on_demand=catalogue.price(kind, Market.ON_DEMAND),
    )


class Bookkeeping:
    """The records of one driver. ``first_step``: steps in the checkpoint it starts from."""

    def __init__(
        self, cost: CostConfig, catalogue: Catalogue, started_s: float, first_step: int
    ) -> None:
        self._cost, self._catalogue = cost, catalogue
        self._up: dict[str, NodeUp] = {}
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
            node = terms(alive[node_id], now_s, self._cost, self._catalogue)
            self._up[node_id] = node
            self._partial |= node.usd_per_hour is None
            records.append(node)
        return records, self._gone(alive.keys(), now_s)

    def _gone(self, alive: AbstractSet[str], now_s: float) -> list[Event]:
        """The cluster may know only when the next generation is at work without the node."""
        gone = {*self._in_use, *self._before} - alive - self._lost
        self._lost |= gone
        return [
            NodeLost(time_s=now_s, node=node, announced=node in self._announced)
            for node in sorted(gone)
        ]

    def usd(self, now_s: float) -> Decimal:
        """Dollars so far of this driver, for the nodes with a known price."""
        return self._spent + sum((_usd(node, now_s) for node in self._up.values()), Decimal(0))

    @property
    def partial(self) -> bool:
        """Whether a node without a known price was used."""
        return self._partial


def _usd(node: NodeUp, now_s: float) -> Decimal:
    hours = Decimal(max(0.0, now_s - node.time_s)) / 3600
    return hours * (node.usd_per_hour or Decimal(0))
