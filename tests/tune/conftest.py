"""A training job's file for sweeps to start from, and the pool that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.ray_connection import connected
from tests.train.conftest import make_config, tiny  # noqa: F401  (a dataset, a model and a job)
from tests.tune.sweeps import FOLDER

TRAIN = """\
name: job
storage: {folder}/runs
steps: 30
model: {{source: model.json}}
data: {{uri: data, sequence_length: 16}}
batch: {{global_sequences: 4, micro_sequences: 2}}
optimizer: {{lr: 1e-3}}
schedule: {{warmup_steps: 10}}
"""


@pytest.fixture
def base_file(tmp_path: Path) -> Path:
    """``train.yaml`` in a folder of its own; sweeps beside it say ``base: train.yaml``."""
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN.format(folder=tmp_path))
    return path


@pytest.fixture(scope="package")
def pool_ended(cluster_session: LocalCluster) -> Iterator[None]:
    """The evaluators stay for all tests of this folder, and no longer."""
    yield
    from ebbtide.tune import members

    with connected(cluster_session.address):
        members.down("ebbtide-pool")


@pytest.fixture
def on_cluster(cluster: LocalCluster, pool_ended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of this process and its children run there."""
    monkeypatch.chdir(FOLDER)  # where ``trials`` is imported from
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
