"""What the controller's side does where a market chooses the run's nodes."""

from __future__ import annotations

import time

import pytest

from ebbtide.platform.ray_seam.decisions import NodeOffer
from ebbtide.train.controller import Judge, Scaling
from ebbtide.train.desk import Desk
from ebbtide.train.elastic import (
    GROWTH_STABLE_S,
    Limits,
    Wish,
)
from ebbtide.train.events import (
    LeaveAsked,
    MarketChange,
)
from ebbtide.train.failures import Released

SPOT = {"ebbtide.dev/market": "spot", "ebbtide.dev/zone": "a"}
ON_DEMAND = {"ebbtide.dev/market": "on_demand"}


def at(name: str, labels: dict[str, str], *, warm: bool = True) -> NodeOffer:
    return NodeOffer(name, 1, warm=warm, labels={**labels, "ray.io/node-id": name})


def wish(desk: Desk, labels: dict[str, str] | None, reason: str = "why") -> None:
    change = MarketChange(time_s=0.0, market=None, zone=None, reason=reason)
    desk.change_wish(Wish(labels, reason), change)


def test_a_market_that_has_not_decided_is_waited_for(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 2), has_market=True)
    assert scaling.to_request([]) == []
    assert scaling.to_start([at("a", SPOT)]) is None
    wish(desk, SPOT)
    assert scaling.to_start([]) is None
    assert scaling.to_request([]) == [SPOT] * 2
    assert scaling.to_start([at("o", ON_DEMAND), at("a", SPOT)]) == 1
    assert scaling.to_place(1) == ["a"]


def test_a_run_moves_when_the_nodes_are_there(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    scaling = Scaling("run", Limits(1, 2), has_market=True)
    wish(desk, ON_DEMAND)
    here = [at("o", ON_DEMAND), at("p", ON_DEMAND)]
    assert scaling.to_start(here) == 2
    attempt = desk.begin(["o", "p"])
    wish(desk, SPOT, "spot is back")

    def asked(*nodes: NodeOffer) -> list[str]:
        scaling.to_resize([*here, *nodes])
        return [event.reason for event in desk.take()[0] if isinstance(event, LeaveAsked)]

    assert asked() == []
    kept = [{"ray.io/node-id": name} for name in ("o", "p")]
    assert scaling.to_request(here) == [SPOT, SPOT, *kept]
    assert asked(at("a", SPOT, warm=False)) == []
    now_s += GROWTH_STABLE_S
    assert asked(at("a", SPOT, warm=False)) == []  # its processes are still starting
    assert asked(at("a", SPOT), at("b", SPOT)) == []  # another one came: maybe more do
    now_s += GROWTH_STABLE_S
    assert asked(at("a", SPOT), at("b", SPOT)) == ["market: spot is back"]
    assert desk.take()[1] == ("a", "b", "o", "p")

    desk.left(attempt, 5)
    all_of_them = [*here, at("a", SPOT), at("b", SPOT)]
    assert scaling.to_resize(all_of_them) == 2
    assert scaling.to_place(2) == ["a", "b"]
    desk.begin(["a", "b"])
    scaling.to_resize(all_of_them)
    assert scaling.to_request(all_of_them) == [SPOT] * 2
    assert desk.interruptions().count == 0


def test_while_spot_is_waited_for_a_run_restarts_where_it_was(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 1), has_market=True)
    wish(desk, ON_DEMAND)
    desk.begin(["o"])
    wish(desk, SPOT)
    assert scaling.to_start([at("o", ON_DEMAND)]) == 1
    assert scaling.to_start([at("o", ON_DEMAND), at("a", SPOT)]) == 1
    assert scaling.to_place(1) == ["a"]


def test_a_market_that_waits_has_the_run_leave_and_its_nodes_released(desk: Desk) -> None:
    scaling = Scaling("run", Limits(1, 1), has_market=True)
    wish(desk, SPOT)
    attempt = desk.begin(["a"])
    assert not desk.is_held()
    wish(desk, None, "price_pause: waiting")
    assert scaling.to_resize([at("a", SPOT)]) is None
    (asked,) = [event for event in desk.take()[0] if isinstance(event, LeaveAsked)]
    assert asked.reason == "market: price_pause: waiting"
    desk.left(attempt, 5)
    assert desk.is_held()
    assert scaling.to_resize([at("a", SPOT)]) is None
    assert scaling.to_request([at("a", SPOT)]) == []
    assert Judge("run", max_failures=0).go_on({0: Released("saved")})
    assert scaling.to_start([at("a", SPOT)]) is None
    wish(desk, SPOT)
    assert scaling.to_start([at("a", SPOT)]) == 1
