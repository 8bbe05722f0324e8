"""The driver's tick, with a plain desk and nodes that are told."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import ray

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import BudgetError, ClusterError
from ebbtide.platform.ledger import LedgerWriter, read_ledger
from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET
from ebbtide.platform.price_feed import Prices
from ebbtide.platform.prices import load_catalogue
from ebbtide.platform.records import Attempt, NodeDown, NodeUp
from ebbtide.platform.storage import LocalStorage
from ebbtide.train import driver as module
from ebbtide.train.bookkeeping import Bookkeeping
from ebbtide.train.desk import Desk
from ebbtide.train.driver import Driver, Progress
from ebbtide.train.events import EventLog, read_events
from ebbtide.train.history import History
from ebbtide.train.spending import Before, Guard
from tests.train.conftest import MakeConfig, Remote
from tests.train.test_bookkeeping import Moving
from tests.train.test_events import step

Make = Callable[..., Driver]


class World:
    """What the driver sees of the cluster, and does to it."""

    def __init__(self) -> None:
        self.alive = ["a", "b"]
        self.prestarted: list[tuple[str, int]] = []

    def nodes(self) -> list[dict[str, Any]]:
        labels = {LABEL_INSTANCE_TYPE: "local-cpu", LABEL_MARKET: "spot"}
        return [{"NodeID": name, "Alive": True, "Labels": labels} for name in self.alive]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    monkeypatch.setattr(ray, "nodes", world.nodes)
    monkeypatch.setattr(module, "draining_nodes", dict)
    monkeypatch.setattr(
        module,
        "prestart_workers",
        lambda node, count, environment: world.prestarted.append((node, count)),
    )
    return world


def run_driver(
    tmp_path: Path,
    make_config: MakeConfig,
    clock: FakeClock,
    act: Callable[[Driver, Desk], None],
    prices: Prices | None = None,
) -> tuple[LocalStorage, list[Progress]]:
    desk, seen = Desk(), list[Progress]()
    workers = {"min": 2, "max": 2, "start_timeout_s": 60}
    limits = {"max_dollars_per_run": 0.024, "pause_above_usd_per_hour": 4}
    config = make_config(workers=workers, budget=limits)
    run = LocalStorage(tmp_path / "run")
    books = Bookkeeping(config.cost, prices or load_catalogue(), clock.time(), 0)
    with EventLog(run, 0) as log, LedgerWriter(run, clock) as ledger:
        guard = Guard(
            config.budget, config.steps, clock.time(), Before(clock.time()), 0, Fraction(9)
        )
        driver = Driver(
            config, Remote(desk), log, ledger, books, guard, History(), clock, seen.append
        )
        act(driver, desk)
    return run, seen


def test_what_happens_reaches_storage_ledger_and_person(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    clock = FakeClock(1000.0)

    def act(driver: Driver, desk: Desk) -> None:
        desk.hold(["a", "b"])
        desk.begin(["a", "b"], "{}")
        driver.tick()
        assert world.prestarted == []
        desk.post(step(1))
        clock.sleep(1800.0)
        driver.tick()
        driver.tick()

    run, seen = run_driver(tmp_path, make_config, clock, act)
    assert [event.kind for event in read_events(run)] == ["generation", "step"]
    records = read_ledger(run).records
    assert {record.node_id for record in records if isinstance(record, NodeUp)} == {"a", "b"}
    assert [record.first_step for record in records if isinstance(record, Attempt)] == [0]
    (progress,) = seen
    assert (progress.step, progress.world_size, progress.usd_partial) == (1, 2, False)
    assert progress.usd is not None
    assert progress.usd > 0
    assert sorted(world.prestarted) == [("a", 1), ("b", 1)]


def test_a_generation_may_leave_and_the_next_begin_between_two_looks(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    def act(driver: Driver, desk: Desk) -> None:
        attempt = desk.begin(["a", "b"], "{}")
        desk.post(step(1))
        desk.left(attempt, 1)
        desk.begin(["a", "b", "c"], "{}")
        driver.tick()

    _, (progress,) = run_driver(tmp_path, make_config, FakeClock(1000.0), act)
    assert (progress.step, progress.attempt, progress.world_size) == (1, 0, 3)


def test_processes_are_kept_warm_again_in_each_generation(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    clock = FakeClock(1000.0)

    def act(driver: Driver, desk: Desk) -> None:
        desk.hold(["a", "b"])
        for attempt in range(2):
            desk.begin(["a", "b", "b"], "{}")
            desk.post(step(1 + attempt, attempt))
            clock.sleep(10.0)
            driver.tick()

    run_driver(tmp_path, make_config, clock, act)
    assert sorted(world.prestarted) == [("a", 1), ("a", 1), ("b", 2), ("b", 2)]


def test_a_run_that_cannot_start_in_time_ends(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    clock = FakeClock()

    def act(driver: Driver, desk: Desk) -> None:
        desk.waiting(2, 1)
        clock.sleep(59.0)
        driver.tick()
        clock.sleep(2.0)
        with pytest.raises(ClusterError, match="needs 2 workers, the cluster has room for 1"):
            driver.tick()

    run_driver(tmp_path, make_config, clock, act)


def test_a_run_that_has_started_waits_for_nodes_as_long_as_it_takes(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    clock = FakeClock()

    def act(driver: Driver, desk: Desk) -> None:
        desk.begin(["a", "b"], "{}")
        driver.tick()
        desk.waiting(2, 1)
        clock.sleep(86400.0)
        driver.tick()

    run_driver(tmp_path, make_config, clock, act)


def test_a_run_at_its_limit_leaves_and_ends_and_nothing_follows(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    """Two nodes at $0.012 an hour."""
    clock = FakeClock(1000.0)

    def act(driver: Driver, desk: Desk) -> None:
        desk.hold(["a", "b"])
        attempt = desk.begin(["a", "b"], "{}")
        driver.tick()
        clock.sleep(3500.0)
        desk.post(step(1))
        driver.tick()
        assert desk.reason_to_leave(attempt) is None
        clock.sleep(97.0)
        driver.tick()
        reason = desk.reason_to_leave(attempt)
        assert reason == "budget: $0.023980 of budget.max_dollars_per_run $0.024000 are spent"
        assert desk.not_before() == float("inf")
        driver.tick()
        desk.left(attempt, 2)
        with pytest.raises(BudgetError, match="are spent. The run is saved at step 2 of 12"):
            driver.tick()

    run, seen = run_driver(tmp_path, make_config, clock, act)
    assert seen[-1].budget == "$0.023333 of $0.024000"
    assert [event.kind for event in read_events(run)].count("leave_asked") == 1


def test_a_run_waits_for_lower_prices_however_long(
    tmp_path: Path, make_config: MakeConfig, world: World
) -> None:
    clock, prices = FakeClock(1000.0), Moving()

    def act(driver: Driver, desk: Desk) -> None:
        prices.usd = Decimal(3)
        desk.hold(["a", "b"])
        driver.tick()
        assert desk.not_before() == float("inf")
        desk.hold([])
        clock.sleep(1.0)
        driver.tick()
        clock.sleep(86_400.0)  # longer than the job waits for nodes
        driver.tick()
        prices.usd = Decimal(2)
        driver.tick()
        assert desk.not_before() == 0.0

    run, _ = run_driver(tmp_path, make_config, clock, act, prices)
    downs = [r.time_s for r in read_ledger(run).records if isinstance(r, NodeDown)]
    assert downs == [1001.0] * 2
