"""What is wrong with a job is said before an engine starts, also on a cluster that is given."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from pathlib import Path

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.config import parse
from ebbtide.platform.errors import ClusterError, ServeError
from ebbtide.platform.ledger import Started, read_ledger
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ports import free_run
from ebbtide.platform.storage import open_storage
from ebbtide.serve import cluster as serving_cluster
from ebbtide.serve import job
from ebbtide.serve.config import ServeConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes every check, though no engine could load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def config(model: Path, text: str = "", port: int | None = None) -> ServeConfig:
    job_file = f"""
        {{name: tide, model: {{uri: {model}}}, http: {{port: {port or free_run(1)}}},
        start_timeout_s: 1, {text}}}"""
    return parse(job_file, ServeConfig)


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="port"):
        job.start(config(model, port=taken.getsockname()[1]))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="no such directory"):
        job.start(config(tmp_path / "nothing"))


def test_more_than_this_machine_has(model: Path) -> None:
    with pytest.raises(ClusterError, match=r"needs 1000 CPUs, has \d+"):
        job.start(config(model, "prefill: {replicas: 999}"))


def test_a_cluster_is_given_time_to_grow(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    clock = FakeClock()
    monkeypatch.setattr(
        serving_cluster, "nodes", lambda: [{"CPU": 1.0 if clock.now_s < 25 else 4.0}]
    )
    job._await_capacity(config(model), is_own=False, deadline_s=60, clock=clock)
    assert 25 <= clock.now_s < 27
    said = {record.message for record in caplog.records}  # the log may have another handler too
    assert len(said) == 3 and all("needs 2 CPUs, has 1" in line for line in said)


def test_and_not_more_than_that(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(serving_cluster, "nodes", lambda: [{"CPU": 1.0}])
    with pytest.raises(ClusterError, match="needs 2 CPUs, has 1; add nodes"):
        job._await_capacity(config(model), is_own=False, deadline_s=60, clock=clock)
    assert 60 <= clock.now_s < 62


def test_a_ledger_that_another_endpoint_writes_is_refused(model: Path, tmp_path: Path) -> None:
    it = config(model, f"ledger: {tmp_path / 'books'}")
    with job._ledger(it):
        text = "another endpoint wrote this ledger .* its own"
        with pytest.raises(ServeError, match=text), job._ledger(it):
            pytest.fail("two wrote one ledger")
        storage = open_storage(str(tmp_path / "books"))
        job._require_own(storage, "books", time.time() + 40)  # as if killed
    with job._ledger(it):  # as the one before has ended
        records = read_ledger(storage).records
    assert sum(isinstance(each, Started) for each in records) == 2


@pytest.mark.parametrize("name", ["events", "checkpoints"])
def test_a_training_runs_ledger_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / name / "some").write_text("{}")
    with pytest.raises(ServeError, match="training run"):
        job.start(config(model, f"ledger: {tmp_path / 'run'}"))


class _Interrupting(FakeClock):
    """Time in which a signal arrives after ``at_s``."""

    def __init__(self, number: int, at_s: float) -> None:
        super().__init__()
        self._number, self._at_s = number, at_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.now_s >= self._at_s:
            os.kill(os.getpid(), self._number)


@pytest.mark.ray
def test_on_a_given_cluster(model: Path, tmp_path: Path, cluster: LocalCluster) -> None:
    with pytest.raises(ClusterError, match="needs 10 CPUs, has 4"):
        job.start(config(model, "decode: {replicas: 9}"), cluster.address)
    with pytest.raises(ServeError, match="no such directory"):
        job.start(config(tmp_path / "nothing"), cluster.address)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="in use"):
        job.start(config(model, port=taken.getsockname()[1]), cluster.address)


def test_no_cluster_at_the_address(model: Path) -> None:
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9.*cannot connect"):
        job.start(config(model), "127.0.0.1:9")
