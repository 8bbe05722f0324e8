"""What a seat costs, from what Ray says of its node."""

from __future__ import annotations

from decimal import Decimal

import pytest
import ray

from ebbtide.platform.errors import CostError
from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET
from ebbtide.train.config import CostConfig
from ebbtide.tune.config import PoolConfig, TuneConfig
from ebbtide.tune.prices import SeatPrices

SPOT = {LABEL_INSTANCE_TYPE: "local-cpu", LABEL_MARKET: "spot"}


def prices(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], cost: CostConfig, **more: object
) -> SeatPrices:
    node = {"NodeID": "node", "Labels": labels, "Resources": {"CPU": 4.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    config = TuneConfig.model_validate(
        {"function": "a:b", "storage": "s", "num_samples": 1, "space": {"x": {"int": [0, 9]}}}
        | {"pool": PoolConfig(cpus=2), **more}
    )
    return SeatPrices(cost, config)


def test_a_seat_costs_its_part_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    by_label = prices(monkeypatch, SPOT, CostConfig(instance_type="none-such"))
    assert by_label.of("node") == Decimal("0.012") / 2
    by_cost = prices(monkeypatch, {}, CostConfig(instance_type="local-cpu"))
    assert by_cost.of("node") == Decimal("0.04") / 2


def test_an_unknown_price_is_none_and_refused_under_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = CostConfig(instance_type="none-such")
    assert prices(monkeypatch, {}, unknown).of("node") is None
    with pytest.raises(CostError, match=r"max_dollars: the price of node node \(none-such"):
        prices(monkeypatch, {}, unknown, max_dollars=1).of("node")
