"""Whole jobs on a real cluster: how they fail, wait, resume, and who may run them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbtide.platform import config as job_file
from ebbtide.platform.account import account
from ebbtide.platform.errors import AccessError, BudgetError, ClusterError, NotFound, TrainingError
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.shared_budget import SharedAccount
from ebbtide.platform.storage import open_storage
from ebbtide.train.checkpoint import read_model_state
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import Failed, Finished, Waiting, read_events
from ebbtide.train.history import History
from ebbtide.train.job import train
from ebbtide.train.manifest import list_checkpoints, newest
from tests.train.conftest import MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def await_condition(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.1)


def ranks_left(cluster: LocalCluster) -> bool:
    return any("RayTrainWorker" in name for name in cluster.process_names())


def test_an_error_of_user_code_ends_the_run_with_its_own_message(
    cluster: LocalCluster, make_config: MakeConfig
) -> None:
    config = make_config(
        model={"loss": "tests.train.user_code:failing_loss"},
        workers={"min": 1, "max": 1, "max_failures": 1},
    )
    with pytest.raises(TrainingError, match="rank 0: ValueError: boom in user code") as raised:
        train(config, address=cluster.address)
    assert raised.value.exit_code == 7
    events = read_events(config.run_uri)
    counted = [event.counted for event in events if isinstance(event, Failed)]
    assert counted == [True, True]
    assert isinstance(events[-1], Finished)
    assert (events[-1].status, "boom" in (events[-1].message or "")) == ("failed", True)
    await_condition(lambda: not ranks_left(cluster))


def test_a_loss_that_is_not_finite_ends_the_run_at_once_and_is_never_saved(
    cluster: LocalCluster, make_config: MakeConfig
) -> None:
    config = make_config(
        optimizer={"lr": 1e30, "clip_norm": 0.0},
        checkpoint={"every": 1, "keep_last": 2},
        workers={"min": 1, "max": 1},
    )
    with pytest.raises(TrainingError, match=r"step \d+: the loss is"):
        train(config, address=cluster.address)
    assert len(History(read_events(config.run_uri)).attempts) == 1
    complete = [info for info in list_checkpoints(open_storage(config.run_uri))]
    for info in complete:
        _, state = read_model_state(info.uri)
        assert all(math.isfinite(float(tensor.sum())) for tensor in state.values())


def test_too_few_nodes_are_told_and_waited_for_until_the_time_out(
    cluster: LocalCluster, make_config: MakeConfig
) -> None:
    workers = {"min": 5, "max": 5, "start_timeout_s": 15.0}
    batch = {"global_sequences": 10, "micro_sequences": 2}
    config = make_config(workers=workers, batch=batch)
    with pytest.raises(ClusterError, match="needs 5 workers, the cluster has room for 4"):
        train(config, address=cluster.address)
    waiting = [event for event in read_events(config.run_uri) if isinstance(event, Waiting)]
    assert [(event.needs, event.has) for event in waiting] == [(5, 4)]

    config = make_config(name="later", workers={**workers, "start_timeout_s": 300}, batch=batch)
    adding = threading.Thread(target=cluster.add_node)
    adding.start()
    result = train(config, address=cluster.address)
    adding.join()
    assert result.world_sizes == [5]


@pytest.fixture
def other_driver(cluster: LocalCluster) -> Iterator[Callable[[TrainConfig], subprocess.Popen[str]]]:
    """Starts a job in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(config: TrainConfig) -> subprocess.Popen[str]:
        file = Path(config.storage).parent / "job.yaml"
        file.write_text(job_file.dump(config))
        command = [sys.executable, "-m", "ebbtide", "train", str(file)]
        started.append(
            subprocess.Popen(
                [*command, "--address", cluster.address],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**cluster.environment, "PYTHONPATH": os.getcwd()},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def checkpoint_is_ahead(run_uri: str) -> bool:
    """Whether a checkpoint has steps that the run's log has not."""
    last, saved = History(read_events(run_uri)).last, newest(open_storage(run_uri))
    return last is not None and saved is not None and saved.step > last.step


def test_a_run_whose_driver_was_killed_goes_on_when_submitted_again(
    cluster: LocalCluster,
    make_config: MakeConfig,
    other_driver: Callable[[TrainConfig], subprocess.Popen[str]],
) -> None:
    config = make_config(
        steps=40,
        model={"loss": "tests.train.user_code:slow_loss"},
        checkpoint={"every": 5},
        workers={"min": 1, "max": 1},
    )
    first = other_driver(config)

    def saved() -> bool:
        assert first.poll() is None, first.communicate()[1]
        return any(event.kind == "checkpoint" for event in read_events(config.run_uri))

    await_condition(saved)
    with pytest.raises(ClusterError, match="another driver"):
        train(config, address=cluster.address)
    first.send_signal(signal.SIGSTOP)  # from now on it stores nothing of what its ranks tell
    await_condition(lambda: checkpoint_is_ahead(config.run_uri), 60.0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    await_condition(lambda: not ranks_left(cluster), 60.0)

    result = train(config, address=cluster.address)
    history = History(read_events(config.run_uri))
    assert (result.step, result.attempts, history.sessions) == (40, 2, 2)
    assert [each.attempt for each in history.attempts] == [0, 1]
    assert history.attempts[0].ended == "driver"
    first_step = history.attempts[1].first_step
    assert first_step is not None
    assert first_step > 5
    assert sorted(history.kept) == list(range(1, 41))
    assert {history.kept[step].attempt for step in range(1, first_step)} == {0}

    again = train(config, address="127.0.0.1:1")
    assert again.was_finished
    assert (again.step, again.attempts) == (40, 2)


def test_a_budget_needs_prices(cluster: LocalCluster, make_config: MakeConfig) -> None:
    file = Path(make_config().storage).parent / "prices.yaml"
    file.write_text("instance_types: {}")
    config = make_config(budget={"max_dollars_per_run": 1}, cost={"catalogue": str(file)})
    with pytest.raises(BudgetError, match=r"price of node \w+ \(local-cpu, spot\) is not known"):
        train(config, address=cluster.address)
    assert not [info.key for info in open_storage(config.run_uri).list()]


def test_a_run_keeps_everything_in_s3(
    cluster: LocalCluster, make_config: MakeConfig, s3_server: LocalS3
) -> None:
    config = make_config(
        storage=f"s3://{s3_server.bucket}/jobs",
        workers={"min": 2, "max": 2},
        checkpoint={"every": 6},
    )
    result = train(config, address=cluster.address)
    assert result.step == 12
    run = open_storage(config.run_uri)
    assert [info.step for info in list_checkpoints(run)] == [12, 6]
    assert sorted(History(read_events(run)).kept) == list(range(1, 13))
    assert any(info.key.startswith("ledger/") for info in run.list())
    assert not [info.key for info in run.list() if info.key.startswith((".probe", "driver.lock"))]


def test_what_is_wrong_is_said_before_anything_starts(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = "127.0.0.1:1"
    with pytest.raises(NotFound, match="ebbtide data prepare"):
        train(make_config(data={"uri": str(tmp_path / "nothing")}), address=nowhere)
    with pytest.raises(ClusterError, match="no Ray cluster answers"):
        train(make_config(), address=nowhere)
    with pytest.raises(ClusterError, match="write host:port"):
        train(make_config(), address="ray://head:10001")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(AccessError, match="AWS_ENDPOINT_URL"):
        train(make_config(storage="s3://bucket/jobs"), address=nowhere)


def test_runs_share_a_sum_of_money(
    cluster: LocalCluster, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Runs of $0.03 and $0.48 do not fit into $0.50 at once; what the first has spent stays taken.

    Nodes cost next to nothing until it has been seen at work, so that it ends when it should.
    """
    prices, place = tmp_path / "prices.yaml", str(tmp_path / "account")

    def set_price(usd_per_hour: str) -> None:
        prices.write_text(
            "instance_types: {local-cpu: {provider: local, vcpus: 1, memory_gb: 4, source: test, "
            f"date: 2025-07-01, usd_per_hour: {{spot: {usd_per_hour}}}}}}}"
        )

    def job(name: str, usd: float = 0.03) -> TrainConfig:
        return make_config(
            name=name,
            steps=2000,
            model={"loss": "tests.train.user_code:slow_loss"},
            workers={"min": 1, "max": 1},
            cost={"catalogue": str(prices)},
            budget={"max_dollars_per_run": usd, "shared": {"uri": place, "max_dollars": 0.5}},
        )

    refused: list[str] = []

    def submit_another(progress: object) -> None:
        if not refused:
            with pytest.raises(BudgetError) as error:
                train(job("second", 0.48), address="127.0.0.1:1")
            refused.append(str(error.value))
            set_price("36")  # $0.01 a second

    set_price("0.000036")
    with pytest.raises(BudgetError, match=r"of budget\.max_dollars_per_run \$0\.03"):
        train(job("first"), address=cluster.address, on_progress=submit_another)
    assert "$0.030000 of the shared $0.5000 are taken by 1 other runs" in refused[0]
    run = job("first").run_uri
    reserved, spent = SharedAccount(open_storage(place)).entries()
    assert [(entry.kind, entry.run) for entry in (reserved, spent)] == [
        ("reserved", run),
        ("spent", run),
    ]
    booked = account(read_ledger(run).records, time.time()).total.spent.usd
    assert booked is not None
    assert float(spent.usd) == pytest.approx(float(booked), rel=1e-6)
    ended = [event.status for event in read_events(run) if isinstance(event, Finished)]
    assert ended == ["stopped"]
    with pytest.raises(BudgetError, match="are taken by 1 other runs"):
        train(job("second", 0.499), address="127.0.0.1:1")
    with pytest.raises(ClusterError, match="no Ray cluster answers"):  # it is admitted
        train(job("second", 0.25), address="127.0.0.1:1")
