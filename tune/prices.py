"""What a seat costs an hour: the part of its node that it reserves, at the node's price."""

from __future__ import annotations

import time
from decimal import Decimal

import ray

from ebbtide.platform.errors import CostError
from ebbtide.platform.ledger import NodeUp
from ebbtide.platform.prices import Catalogue, load_catalogue
from ebbtide.train.bookkeeping import ClusterNode, terms
from ebbtide.train.config import CostConfig
from ebbtide.tune.config import TuneConfig


class SeatPrices:
    """Looked up once a node. Nodes say what they are by their labels, else ``cost`` does."""

    def __init__(self, cost: CostConfig, config: TuneConfig) -> None:
        self._cost, self._config = cost, config
        self._catalogue: Catalogue | None = (
            None  # read when it is needed, not before a sweep starts
        )
        self._known: dict[str, NodeUp] = {}

    def of(self, node_id: str) -> Decimal | None:
        """Dollars an hour, None if unknown. Raises CostError then if the sweep has max_dollars."""
        return self.terms(node_id).usd_per_hour

    def terms(self, node_id: str) -> NodeUp:
        """What a seat's part of a node is, and costs. Raises CostError like :meth:`of`."""
        if node_id not in self._known:
            self._known[node_id] = self._look_up(node_id)
        return self._known[node_id]

    def _look_up(self, node_id: str) -> NodeUp:
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        self._catalogue = self._catalogue or load_catalogue(self._cost.catalogue)
        held = terms(ClusterNode(node_id, node["Labels"]), time.time(), self._cost, self._catalogue)
        if held.usd_per_hour is None and self._config.max_dollars is not None:
            raise CostError(
                f"max_dollars: the price of node {node_id[:8]} "
                f"({held.instance_type or 'of no known type'}, {held.market}) is unknown; set "
                "cost.instance_type or cost.catalogue, or remove max_dollars"
            )
        share = min(1.0, self._config.pool.cpus / max(node["Resources"].get("CPU", 0.0), 1e-3))
        return held.model_copy(
            update={
                key: None if price is None else price * Decimal(str(share))
                for key, price in (
                    ("usd_per_hour", held.usd_per_hour),
                    ("usd_per_hour_on_demand", held.usd_per_hour_on_demand),
                )
            }
        )
