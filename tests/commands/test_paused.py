"""A run watched by a real Prometheus, paused, and taken up on another cluster by its URI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebbtide.platform import child_process
from ebbtide.platform import config as job_file
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.metrics import METRICS, PREFIX
from ebbtide.platform.ports import free_ports
from ebbtide.platform.ray_seam.environment import QUICK_METRICS
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import read_events
from ebbtide.train.history import History
from ebbtide.train.manifest import list_checkpoints
from tests.test_dashboards import expressions
from tests.train.conftest import MakeConfig
from tests.train.test_elastic import undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LIMIT_S = 240.0


def await_condition(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.2)


@pytest.fixture
def first_cluster() -> Iterator[LocalCluster]:
    """A cluster of one node that serves metrics; it is gone when the other one is used."""
    with LocalCluster(1, environment=QUICK_METRICS) as cluster:
        yield cluster


class Prometheus:
    """A Prometheus that scrapes every node of a cluster once a second, or the nodes themselves."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.targets = metrics_addresses(cluster)
        self._port = free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None
        if shutil.which("prometheus") is None:
            return
        settings = folder / "prometheus.yml"
        settings.write_text(
            json.dumps(  # JSON is YAML
                {
                    "global": {"scrape_interval": "1s"},
                    "scrape_configs": [
                        {"job_name": "ray", "static_configs": [{"targets": self.targets}]}
                    ],
                }
            )
        )
        command = [
            "prometheus",
            f"--config.file={settings}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._process = child_process.start(command, log=folder / "prometheus.log")

    def close(self) -> None:
        if self._process is not None:
            child_process.stop(self._process)

    @property
    def is_there(self) -> bool:
        return self._process is not None

    def names(self) -> set[str]:
        """The names of all of ebbtide's series so far."""
        if not self.is_there:
            return {name for target in self.targets for name in scraped(target)}
        found = self._ask("label/__name__/values")
        return {name for name in found or () if PREFIX in name}

    def query(self, expression: str) -> list[Any]:
        """What an expression is now; an expression that is wrong fails the test."""
        found = self._ask("query?" + urllib.parse.urlencode({"query": expression}))
        return [] if found is None else list(found["result"])

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is not ready yet
                return None
            pytest.fail(f"{path}: {error.read().decode()}")
        except OSError:  # it does not listen yet
            return None


def metrics_addresses(cluster: LocalCluster) -> list[str]:
    import ray

    ray.init(cluster.address, log_to_driver=False, configure_logging=False)
    try:
        return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    finally:
        ray.shutdown()


def scraped(target: str) -> set[str]:
    try:
        with urllib.request.urlopen(f"http://{target}/metrics") as answer:
            text = answer.read().decode()
    except OSError:  # it does not listen yet
        return set()
    found = (family.name for family in text_string_to_metric_families(text))
    return {name for name in found if PREFIX in name}


def ebbtide(*arguments: str, cluster: LocalCluster) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ebbtide", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**cluster.environment, "PYTHONPATH": os.getcwd()},
    )


def set_price(file: str, usd_per_hour: float) -> None:
    Path(file).write_text(
        "instance_types: {local-cpu: {provider: local, vcpus: 1, memory_gb: 4, source: test, date: "
        f"2025-07-01, usd_per_hour: {{spot: {usd_per_hour}, on_demand: {3 * usd_per_hour}}}}}}}"
    )


def watch_and_pause(
    cluster: LocalCluster, config: TrainConfig, folder: Path
) -> tuple[set[str], dict[str, str]]:
    """Train until everything has been seen; then nodes become too dear, and the driver is stopped
    when no rank holds one any more. The metrics' names, and which expression of which dashboard
    has shown nothing."""
    file = folder / "job.yaml"
    file.write_text(job_file.dump(config))
    watch = Prometheus(cluster, folder)
    run = ebbtide("train", str(file), "--address", cluster.address, cluster=cluster)
    wanted = {f"ray_{PREFIX}{name}" for name in METRICS}
    empty: dict[str, str] = {}

    def seen() -> bool:
        empty.clear()
        if not wanted <= watch.names():
            return False
        if watch.is_there:
            empty.update((e, b) for b, e in expressions(config.name) if not watch.query(e))
        return not empty

    try:
        await_condition(seen, run)
        names = watch.names()
        set_price(str(config.cost.catalogue), 2.0)
        await_condition(lambda: "RayTrainWorker" not in " ".join(cluster.process_names()), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, run.communicate()
    finally:
        run.kill()
        run.communicate()
        watch.close()
    return names, empty


def test_a_run_is_watched_paused_and_taken_up_elsewhere(
    first_cluster: LocalCluster,
    cluster: LocalCluster,
    make_config: MakeConfig,
    s3_server: LocalS3,
    tmp_path: Path,
) -> None:
    """Every metric is scraped from a real run, and every panel of the dashboards shows something.
    Then the run goes on from one of its checkpoints, in another cluster, without a file of its."""
    model, prices = tmp_path / "model.json", str(tmp_path / "prices.yaml")
    set_price(prices, 0.5)
    shutil.copy(make_config().model.source or "", model)
    config = make_config(
        name="paused",
        steps=600,
        storage=f"s3://{s3_server.bucket}/paused",
        model={"source": str(model), "loss": "tests.train.user_code:slow_loss"},
        workers={"min": 1, "max": 1},
        checkpoint={"every": 3},
        validation={"every_steps": 3},
        schedule={"min_lr_ratio": 1.0},  # the rate does not depend on how many steps there are
        budget={"max_dollars_per_run": 5, "pause_above_usd_per_hour": 1},
        cost={"catalogue": prices, "egress_usd_per_gb": 0.09},
    )
    names, empty = watch_and_pause(first_cluster, config, tmp_path)
    assert empty == {}
    assert names == {f"ray_{PREFIX}{name}" for name in METRICS}
    first_cluster.stop()

    run = open_storage(config.run_uri)
    saved = list_checkpoints(run)
    steps = saved[0].step + 4
    model.unlink()  # it was on the first cluster only
    done = ebbtide(
        *("train", "--resume", saved[-1].uri, "--address", cluster.address),
        *("--set", f"steps={steps}", "--set", "cost.catalogue=", "--json"),
        cluster=cluster,
    )
    out, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, errors
    assert json.loads(out)["step"] == steps
    history = History(read_events(run))
    assert [each.attempt for each in history.attempts] == [0, 1]
    assert history.attempts[1].first_step == saved[0].step + 1
    assert history.steps_lost() == 0

    same = make_config(steps=steps, schedule={"min_lr_ratio": 1.0})
    losses = {number: step.loss for number, step in history.kept.items()}
    assert losses == {step.step: step.loss for step in undisturbed(same).steps}

    told = ebbtide("cost", config.run_uri, "--json", cluster=cluster)
    account = json.loads(told.communicate(timeout=LIMIT_S)[0])
    assert account["status"] == "finished"
    assert [part["attempt"] for part in account["attempts"]] == [0, 1]
