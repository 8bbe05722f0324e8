"""The market's controller of a run: an actor beside the driver that decides where its nodes are.

It watches nodes, notices, prices and progress, asks the policy once a tick, and tells the desk; the
run's controller then asks Ray's autoscaler for such nodes and moves the run when they are there.
Promises: every change is an event of the run, with its reason; a controller whose process dies is
started again by Ray and goes on with what it knew; it ends with the driver, and the request for
nodes with it. It is not detached: one that outlived its driver would go on buying nodes for nobody.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

from ebbtide.platform.errors import ClusterError, CostError
from ebbtide.platform.market.config import NEVER_S, MarketConfig
from ebbtide.platform.market.live import (
    ANY_ZONE,
    Decision,
    LiveMarket,
    State,
    View,
    count,
    place_of,
)
from ebbtide.platform.market.policy import Terms
from ebbtide.platform.price_feed import PriceFeed, Prices
from ebbtide.platform.prices import Market
from ebbtide.train.admission import resources
from ebbtide.train.config import TrainConfig
from ebbtide.train.elastic import Running, Wish
from ebbtide.train.events import MarketChange

logger = logging.getLogger(__name__)


def work_left_s(
    market: MarketConfig, steps: int, step: int, step_s: float | None, time_left_s: float
) -> float:
    """The seconds of progress that the run still needs, as far as is known.

    Before a step was timed it is taken to go as ``market.hours`` says, else to need half of the
    time that is left.
    """
    if step_s is not None:
        return (steps - step) * step_s
    if market.hours is not None:
        return market.hours * 3600 * (steps - step) / steps
    return time_left_s / 2


def named(zone: str) -> str | None:
    """The zone whose price is asked for; None where the cloud chooses it."""
    return None if zone == ANY_ZONE else zone


def require_market_prices(config: TrainConfig, feed: Prices) -> None:
    """Raise CostError if a job with a market lacks a price that the policy needs."""
    market = config.market
    if market is None:
        return
    kind = market.instance_type or config.cost.instance_type
    if isinstance(feed, PriceFeed) and kind:
        feed.learn([kind])
    unknown = [
        what
        for what, price in (
            ("on_demand", feed.price(kind, Market.ON_DEMAND)),
            *(
                (f"spot in {zone}", feed.price(kind, Market.SPOT, named(zone)))
                for zone in market.zones
            ),
        )
        if price is None
    ]
    if unknown:
        raise CostError(
            f"market: the price of {kind or 'the nodes'} is not known: {', '.join(unknown)}; name "
            "market.instance_type, and give its prices in the catalogue (cost.catalogue)"
        )


class MarketController:
    """``run`` looks, decides and tells, for ever. Everything is of one run."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        assert config.market is not None
        self._config, self._market, self._first_step = config, config.market, first_step
        self._kind = self._market.instance_type or config.cost.instance_type
        self._needs = resources(config)
        self._fewest = math.ceil(config.workers.min / self._market.workers_per_node)
        self._live = LiveMarket(self._market.chosen(), self._market.give_up_s, self._market.retry_s)
        self._step_s: float | None = None

    def run(self) -> None:
        """Until the process ends. Raises what goes wrong, for the driver to know."""
        import ray

        from ebbtide.train.desk import find_desk

        desk = find_desk(self._config.run_uri)
        feed = PriceFeed(self._config.cost.catalogue, self._config.cost.live)
        with feed:
            if self._kind:
                feed.learn([self._kind])
            state: State | None = ray.get(desk.market_state.remote())
            while True:
                began_s = time.monotonic()
                standing = ray.get(desk.standing.remote())
                running = standing.running if standing is not None else None
                state = self._tick(desk, feed, state, running)
                time.sleep(max(0.0, self._market.tick_s - (time.monotonic() - began_s)))

    def _tick(self, desk: Any, feed: Prices, state: State | None, running: Running | None) -> State:
        import ray

        view = self._view(feed, running, time.time())
        first = state is None
        state = state or self._live.start(self._terms(view), view.now_s)
        decision, state = self._live.decide(state, view)
        if decision.reason is not None or first:
            wish, change = self._told(decision, view.now_s)
            ray.get(desk.change_wish.remote(wish, change))
        ray.get(desk.keep_market.remote(state))
        return state

    def _told(self, decision: Decision, now_s: float) -> tuple[Wish, MarketChange]:
        place, reason = decision.place, decision.reason or ""
        labels = None if place is None else {**self._market.labels, **place.labels}
        change = MarketChange(
            time_s=now_s,
            market=None if place is None else place.market.value,
            zone=None if place is None else place.zone,
            reason=reason,
        )
        return Wish(labels, reason), change

    def _terms(self, view: View) -> Terms:
        return Terms(
            work_s=view.work_left_s,
            deadline_s=self._time_left_s(view.now_s),
            restart_s=self._market.restart_s,
            tick_s=self._market.tick_s,
            zones=self._market.zones,
            nodes=self._fewest,
        )

    def _time_left_s(self, now_s: float) -> float:
        deadline: datetime | None = self._market.deadline
        return NEVER_S if deadline is None else max(0.0, deadline.timestamp() - now_s)

    def _view(self, feed: Prices, running: Running | None, now_s: float) -> View:
        labels = self._nodes()
        place, starting_s, step = None, 0.0, self._first_step
        if running is not None:
            zones = self._market.zones
            here = [place_of(labels[node], zones) for node in running.nodes if node in labels]
            place = next(iter(here), None)
            step = max(step, running.step)
            if running.step_s is None:
                starting_s = max(0.0, self._market.restart_s - (now_s - running.began_s))
            self._step_s = running.step_s or self._step_s
        time_left_s = self._time_left_s(now_s)
        steps = self._config.steps
        on_demand_usd = float(feed.price(self._kind, Market.ON_DEMAND) or Decimal(0))
        return View(
            now_s=now_s,
            nodes=count(labels.values(), self._market.zones),
            running=place,
            starting_s=starting_s,
            work_left_s=work_left_s(self._market, steps, step, self._step_s, time_left_s),
            spot_usd=tuple(
                float(feed.price(self._kind, Market.SPOT, named(zone)) or on_demand_usd)
                for zone in self._market.zones
            ),
            on_demand_usd=on_demand_usd,
        )

    def _nodes(self) -> dict[str, dict[str, str]]:
        """The labels of the nodes that a worker fits on and that are not announced to go."""
        import ray

        from ebbtide.platform.ray_seam.state import draining_nodes

        going = draining_nodes()
        return {
            node["NodeID"]: node.get("Labels") or {}
            for node in ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in going
            and all(
                node["Resources"].get(name, 0) >= amount for name, amount in self._needs.items()
            )
            and self._market.labels.items() <= (node.get("Labels") or {}).items()
        }


@contextlib.contextmanager
def supervised(config: TrainConfig, first_step: int) -> Iterator[Callable[[], None]]:
    """The run's market controller, if the job has a market; what is yielded, called often, raises
    ClusterError if it has failed."""
    if config.market is None:
        yield lambda: None
        return
    import ray
    import ray.exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    controller = (
        ray.remote(MarketController)
        .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
        .remote(config, first_step)
    )
    running = controller.run.remote()

    def check() -> None:
        if ray.wait([running], timeout=0)[0]:
            try:
                ray.get(running)
            except ray.exceptions.RayError as error:
                raise ClusterError(f"the market's controller has failed: {error}") from error

    try:
        yield check
    finally:
        ray.kill(controller)
