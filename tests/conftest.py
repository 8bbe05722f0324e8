"""What tests share: real servers and clusters, started once a session."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_s3 import LocalS3

CLUSTER_NODES = 4

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)  # interrupted children inherit it

settings.register_profile("ebbtide", deadline=None)  # a busy machine is no fault
settings.load_profile("ebbtide")


@pytest.fixture(scope="session")
def s3_session() -> Iterator[LocalS3]:
    """One SeaweedFS server for the session."""
    with LocalS3() as server:
        yield server


@pytest.fixture
def s3_server(s3_session: LocalS3, monkeypatch: pytest.MonkeyPatch) -> LocalS3:
    """The session's S3 server, with the AWS variables leading to it."""
    for name, value in s3_session.environment.items():
        monkeypatch.setenv(name, value)
    return s3_session


@pytest.fixture(scope="session")
def cluster_session() -> Iterator[LocalCluster]:
    """One Ray cluster for the session: a head without CPUs and one-CPU nodes, with a dashboard."""
    with LocalCluster(CLUSTER_NODES, dashboard=True) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_session: LocalCluster) -> Iterator[LocalCluster]:
    """The session's cluster with all its nodes; what a test kills or drains is replaced here.

    ``cluster.nodes`` holds the nodes; connect to ``cluster.address``. A test leaves no driver
    connected.
    """
    cluster_session.restore(CLUSTER_NODES)
    yield cluster_session
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
