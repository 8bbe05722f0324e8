"""What tests share: real servers and clusters, started once a session."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_s3 import LocalS3
from tests.faulty_s3 import FaultyS3

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
def faulty_session(s3_session: LocalS3) -> Iterator[FaultyS3]:
    """A proxy before the session's S3 server."""
    with FaultyS3(s3_session) as proxy:
        yield proxy


@pytest.fixture
def faulty_s3(faulty_session: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The session's S3 server as it can be: behind a proxy that obeys rules. AWS variables lead
    there."""
    for name, value in faulty_session.environment.items():
        monkeypatch.setenv(name, value)
    faulty_session.set()
    yield faulty_session
    faulty_session.set()


@pytest.fixture
def retry_gaps_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that botocore makes before it tries again, in this process; they are not waited
    for."""
    gaps_s: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=gaps_s.append))
    return gaps_s


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
