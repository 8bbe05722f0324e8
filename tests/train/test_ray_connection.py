"""A driver's connection to a cluster leaves the process as it was."""

from __future__ import annotations

import signal

import pytest

from ebbtide.platform import signals
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.ray_connection import connected


@pytest.mark.ray
def test_the_handlers_of_before_stay(cluster_session: LocalCluster) -> None:
    before = [signal.getsignal(number) for number in signals.NUMBERS]
    with connected(cluster_session.address):
        assert [signal.getsignal(number) for number in signals.NUMBERS] == before
