"""A run's figures for Prometheus: right, and silent about what is not known."""

from __future__ import annotations

import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform import metrics
from ebbtide.platform.account import account
from ebbtide.platform.budget import Books, BudgetConfig, shares
from ebbtide.platform.clock import FakeClock
from ebbtide.platform.ledger import LedgerWriter, read_ledger
from ebbtide.platform.meter import Owner
from ebbtide.platform.metrics import METRICS, Publisher, Sample
from ebbtide.platform.prices import Market
from ebbtide.platform.records import NodeUp, Record, Span
from ebbtide.platform.storage import LocalStorage
from ebbtide.train.events import (
    Checkpoint,
    Event,
    Failed,
    GenerationBegan,
    Left,
    NodeLost,
    Notice,
    Validation,
)
from ebbtide.train.history import History
from ebbtide.train.telemetry import (
    AccountWatch,
    Figures,
    Telemetry,
    of_account,
    of_budget,
    of_nodes,
)
from tests.train.test_events import step

T = 1000.0


def named(samples: Any) -> dict[str, float]:
    """``name{tag values}``: value; every sample has the labels that its metric has."""
    found = {}
    for sample in samples:
        assert set(sample.tags) == set(METRICS[sample.name].labels)
        found[" ".join((sample.name, *sample.tags.values()))] = sample.value
    return found


EVENTS: list[Event] = [
    GenerationBegan(time_s=T, attempt=0, world_size=2, nodes=("a", "b")),
    *(step(number, loss=8.0 - number) for number in range(1, 4)),
    Checkpoint(time_s=T, attempt=0, step=2, uri="x", took_s=0.5, size_bytes=100),
    Validation(time_s=T, attempt=0, step=2, loss=6.5),
    Notice(time_s=T, node="b", deadline_s=None),
    NodeLost(time_s=T, node="b", announced=True),
    NodeLost(time_s=T, node="a", announced=False),
    Failed(time_s=T, attempt=0, cause="node lost", message="", counted=False),
    GenerationBegan(time_s=T, attempt=1, world_size=1, nodes=("c",)),
    Failed(time_s=T, attempt=1, cause="crash", message="", counted=True),
    GenerationBegan(time_s=T, attempt=2, world_size=1, nodes=("c",)),
    step(3, 2, loss=4.0),
]


def figures(events: list[Event]) -> dict[str, float]:
    kept = Figures()
    kept.follow(events)
    return named(kept.samples(History(events), 10))


def test_progress_and_what_ended_attempts() -> None:
    found = figures(EVENTS)
    assert found["step"] == 3
    assert (found["steps"], found["steps_lost"], found["tokens"]) == (10, 1, 3 * 128)
    assert (found["loss"], found["validation_loss"]) == (4.0, 6.5)
    assert (found["world_size"], found["attempt"]) == (1, 2)
    assert [found[f"interruptions {kind}"] for kind in ("notice", "kill", "failure")] == [1, 1, 1]
    assert (found["checkpoint_step"], found["checkpoint_seconds"]) == (2, 0.5)
    assert (found["checkpoint_bytes"], found["step_seconds compute"]) == (100, 0.5)
    assert "tokens_per_second" not in found  # this attempt has made one step


def test_what_is_not_known_is_not_said() -> None:
    assert figures([]).keys() == {
        *("steps", "steps_lost", "tokens"),
        *(f"interruptions {kind}" for kind in ("notice", "kill", "failure")),
    }
    gone = [*EVENTS[:4], Left(time_s=T, attempt=0, step=3)]
    assert figures(gone)["world_size"] == 0


def node(name: str, usd: str | None, market: Market = Market.SPOT) -> NodeUp:
    price = None if usd is None else Decimal(usd)
    return NodeUp(
        node_id=name,
        time_s=T,
        instance_type="box",
        market=market,
        zone="z",
        usd_per_hour=price,
        usd_per_hour_on_demand=price and 3 * price,
    )


def test_seconds_and_dollars_are_those_of_the_account(tmp_path: Path) -> None:
    clock = FakeClock(T + 10)
    records: list[Record] = [
        node("a", "3.60"),
        Span(node_id="a", attempt=0, start_s=T, end_s=T + 8, seconds={Owner.COMPUTE: 8.0}),
    ]
    with LedgerWriter(LocalStorage(tmp_path), clock) as ledger:
        for record in records:
            ledger.write(record)
    with AccountWatch(LocalStorage(tmp_path), clock) as watch:
        assert watch.read() >= 10.0
    assert watch.account == account(read_ledger(LocalStorage(tmp_path)).records, clock.time())
    found = named(of_account(watch.account))
    assert found["node_seconds compute spot"] == 8.0
    assert found["dollars compute spot"] == pytest.approx(0.008)
    assert found["dollars_on_demand"] == pytest.approx(0.030)
    assert found["goodput_ratio"] == pytest.approx(0.8)
    assert found["unpriced_node_seconds"] == 0

    free = named(of_account(account([node("b", None)], T + 5)))
    assert free["unpriced_node_seconds"] == 5
    assert not [name for name in free if name.startswith(("dollars ", "dollars_on_demand"))]


def test_a_storage_that_is_away_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ebbtide.train.telemetry"):
        watch = AccountWatch(LocalStorage(tmp_path / "run"), FakeClock())
        watch.read()
        assert watch.account is None
        assert not caplog.messages  # a ledger that has not begun is nothing to tell
        ledger = tmp_path / "run" / "ledger"
        ledger.mkdir(parents=True)
        (ledger / "a.jsonl").symlink_to("a.jsonl")
        for _ in range(2):
            watch.read()
    assert watch.account is None
    (told,) = caplog.messages
    assert told.startswith("the ledger cannot be read for the metrics")


def test_nodes_and_limits() -> None:
    nodes = [node("a", "1"), node("b", "1"), node("c", "2", Market.ON_DEMAND)]
    assert named(of_nodes(nodes, Decimal(4))) == {
        "nodes spot z box": 2,
        "nodes on_demand z box": 1,
        "dollars_per_hour": 4.0,
    }
    limits = BudgetConfig(max_dollars_per_run=Decimal(8), max_dollars_per_hour=Decimal(5))
    books = Books(T, 0.0, Decimal(2), Decimal(1), Decimal(4), step=1, steps=9)
    assert named(of_budget(shares(limits, books))) == {
        "budget_ratio max_dollars_per_run": 0.25,
        "budget_ratio max_dollars_per_hour": 0.8,
    }
    assert shares(BudgetConfig(max_dollars_per_run=Decimal(0)), books) == {}


def test_everything_is_set_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray forgets a gauge that is not."""
    seen: list[list[Sample]] = []
    monkeypatch.setattr(Publisher, "publish", lambda _, samples: seen.append(list(samples)))
    clock = FakeClock(T)
    watch = AccountWatch(LocalStorage(tmp_path), clock)
    telemetry = Telemetry("run", watch, clock, EVENTS)
    assert telemetry.is_due
    telemetry.publish([Sample("step", 1)])
    assert not telemetry.is_due
    watch.account = account([node("a", "1")], T + 1)
    clock.sleep(5.0)
    assert telemetry.is_due
    telemetry.publish([Sample("step", 2)])
    assert [[sample.name for sample in each][:1] for each in seen] == [
        ["step"],
        ["step"],
        ["node_seconds"],
    ]
    assert set(named(telemetry.figures.samples(History(EVENTS), 10))) > {"validation_loss"}
    assert metrics.PREFIX == "ebbtide_run_"
