"""Jobs that their budget does not let start: no cluster is reached."""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.errors import BudgetError, ClusterError
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.prices import Market
from ebbtide.platform.records import Epoch, Finished, NodeUp
from ebbtide.platform.shared_budget import SharedAccount
from ebbtide.platform.storage import LocalStorage
from ebbtide.train.events import EventLog, Started
from ebbtide.train.job import train
from tests.train.conftest import MakeConfig

NOWHERE = "127.0.0.1:1"


def test_a_job_that_does_not_fit_a_shared_budget_is_not_started(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    pool = SharedAccount(LocalStorage(tmp_path / "team"))
    pool.reserve("another", Decimal(6), Decimal(10), 0.0)

    def start(name: str, usd: float) -> None:
        shared = {"uri": str(tmp_path / "team"), "max_dollars": 10}
        budget = {"max_dollars_per_run": usd, "shared": shared}
        train(make_config(name=name, budget=budget), address=NOWHERE)

    with pytest.raises(BudgetError, match=r"may cost \$5.0000 .* \$6.0000 of the shared \$10.00"):
        start("run", 5)
    with pytest.raises(ClusterError, match="no Ray cluster answers"):
        start("run", 4)
    assert [(e.run.rpartition("/")[2], e.kind, e.usd) for e in pool.entries()] == [
        ("another", "reserved", Decimal(6)),
        ("run", "reserved", Decimal(4)),
        ("run", "spent", Decimal(0)),
    ]


def test_what_earlier_drivers_spent_is_spent(make_config: MakeConfig) -> None:
    config = make_config(budget={"max_dollars_per_run": 2, "max_dollars_per_epoch": 0.5})
    run, now_s = LocalStorage(Path(config.run_uri)), time.time()
    with EventLog(run, 0) as log, LedgerWriter(run) as ledger:
        log.write([Started(time_s=now_s - 3600, steps=12)])
        price = Decimal(1)
        ledger.write(
            NodeUp(
                node_id="n",
                time_s=now_s - 3600,
                instance_type="box",
                market=Market.SPOT,
                usd_per_hour=price,
                usd_per_hour_on_demand=price,
            )
        )
        ledger.write(Epoch(index=0, start_s=now_s - 3600))
        ledger.write(Finished(time_s=now_s, status="failed"))
    said = r"not started: \$1.0000 of budget.max_dollars_per_epoch \$0.5000 are spent"
    with pytest.raises(BudgetError, match=said):
        train(config, address=NOWHERE)
    for key, value in (("max_dollars_per_run", 0), ("deadline", "2020-01-01T00:00:00Z")):
        with pytest.raises(BudgetError, match=f"not started: budget.{key}"):
            train(make_config(budget={key: value}), address=NOWHERE)
