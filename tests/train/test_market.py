"""A job that chooses its nodes by market: on a cluster made by Ray's autoscaler, and in parts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ebbtide.platform import config as job_file
from ebbtide.platform.errors import CostError
from ebbtide.platform.market.config import MarketConfig
from ebbtide.platform.prices import load_catalogue
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import MarketChange, Step, read_events
from ebbtide.train.history import History
from ebbtide.train.market import require_market_prices, work_left_s
from tests.platform.ray_seam.autoscaling import AutoscalingCluster, node_type
from tests.train.conftest import MakeConfig
from tests.train.test_elastic import undisturbed

LIMIT_S = 300.0
MARKET = {
    "policy": "priority",
    "zones": ["local-a"],
    "instance_type": "local-cpu",
    "restart_s": 10,
    "give_up_s": 30,
    "retry_s": 15,
    "tick_s": 0.5,
}


@pytest.fixture
def autoscaling() -> Iterator[AutoscalingCluster]:
    """One spot node and two on-demand nodes may be had."""
    types = {
        "spot-a": node_type("spot", "local-a", 1),
        "on-demand": node_type("on_demand", "local-b", 2),
    }
    with (
        tempfile.TemporaryDirectory(prefix="eb-auto-") as folder,
        AutoscalingCluster(Path(folder), types) as cluster,
    ):
        yield cluster


class Run:
    """``ebbtide train`` in a process of its own, and what it has done so far."""

    def __init__(self, cluster: AutoscalingCluster, config: TrainConfig, folder: Path) -> None:
        self._cluster, self._config = cluster, config
        file = folder / "job.yaml"
        file.write_text(job_file.dump(config))
        self._log = folder / "driver.log"
        command = [sys.executable, "-m", "ebbtide", "train", str(file)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--address", cluster.address],
                stdout=log,
                stderr=log,
                env={**cluster.environment, "PYTHONPATH": os.getcwd()},
            )

    def steps_on(self, market: str) -> bool:
        """Whether the newest attempt makes steps on living nodes of this market."""
        events = read_events(self._config.run_uri)
        attempts = History(events).attempts
        nodes = {node.node_id for node in self._cluster.nodes(market)}
        made = {event.attempt for event in events if isinstance(event, Step)}
        return bool(attempts) and attempts[-1].attempt in made and {*attempts[-1].nodes} <= nodes

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            told = f"{self._log.read_text()[-6000:]}\n{self._cluster.logs()}"
            assert self.process.poll() is None, told
            assert time.monotonic() < deadline_s, told
            time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.slow
def test_spot_that_vanishes_is_replaced_by_on_demand_and_taken_up_when_it_is_back(
    autoscaling: AutoscalingCluster, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        steps=500,
        model={"loss": "tests.train.user_code:slow_loss"},
        schedule={"min_lr_ratio": 1.0},
        workers={"min": 1, "max": 1},
        cost={"instance_type": "local-cpu"},
        market=MARKET,
    )
    run = Run(autoscaling, config, tmp_path)
    try:
        run.until(lambda: run.steps_on("spot"))
        assert autoscaling.nodes("on_demand") == []
        assert autoscaling.kill("ray::MarketController") == 1  # it comes back, and knows the rest
        autoscaling.close("spot-a", "spot")
        run.until(lambda: run.steps_on("on_demand"))
        autoscaling.open("spot-a")
        run.until(lambda: run.steps_on("spot"))
        run.until(lambda: not autoscaling.nodes("on_demand"))  # it was idle, and is paid no more
    finally:
        run.process.kill()
        run.process.wait()

    events = read_events(config.run_uri)
    changes = [event for event in events if isinstance(event, MarketChange)]
    markets = [event.market for event in changes]
    assert markets[:2] == ["spot", "on_demand"]  # a new start would have decided for spot again
    assert markets[-1] == "spot"
    assert "spot was taken away in local-a" in changes[1].reason
    history = History(events)
    assert [each.ended for each in history.attempts][:2] == ["failure", "market"]
    same = make_config(steps=max(history.kept), schedule={"min_lr_ratio": 1.0})
    losses = {step.step: step.loss for step in undisturbed(same).steps}
    assert all(losses[number] == step.loss for number, step in history.kept.items())


def test_the_work_that_is_left() -> None:
    market = MarketConfig(zones=("a",), policy="priority")
    assert work_left_s(market, 100, 40, 2.0, 999.0) == 120.0
    assert work_left_s(market, 100, 40, None, 1000.0) == 500.0
    known = market.model_copy(update={"hours": 1.0})
    assert work_left_s(known, 100, 75, None, 1000.0) == 900.0


def test_a_market_needs_prices(make_config: MakeConfig) -> None:
    config = make_config(market={**MARKET, "instance_type": "no-such-type"})
    with pytest.raises(CostError, match="no-such-type is not known: on_demand, spot in local-a"):
        require_market_prices(config, load_catalogue())
    require_market_prices(make_config(market=MARKET), load_catalogue())
    require_market_prices(make_config(), load_catalogue())


def test_a_market_is_part_of_the_job_file(make_config: MakeConfig) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    config = make_config(market={"zones": ["a", "b"], "deadline": later})
    again = job_file.parse(job_file.dump(config), TrainConfig)
    assert again == config
    assert again.market is not None
    assert again.market.chosen().name == "tide"
