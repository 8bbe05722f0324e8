"""A driver's connection to a cluster leaves the process as it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ebbtide.platform import signals
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.ray_connection import connected


def test_a_ray_that_does_not_start_is_an_error_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ClusterError, match="timed out during startup"), connected("local"):
        pass


@pytest.mark.ray
def test_the_handlers_of_before_stay(cluster_session: LocalCluster) -> None:
    before = [signal.getsignal(number) for number in signals.NUMBERS]
    with connected(cluster_session.address):
        assert [signal.getsignal(number) for number in signals.NUMBERS] == before


@pytest.mark.ray
@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGTERM, signals.Terminated), (signal.SIGINT, signals.Interrupted)],
)
def test_a_signal_in_a_call_of_ray_stays_that_signal(
    cluster_session: LocalCluster, number: signal.Signals, kind: type[BaseException]
) -> None:
    import ray

    with signals.kept():
        signal.signal(number, lambda number, _: _throw(signals.arrived(number)))
        with pytest.raises(kind) as caught, connected(cluster_session.address):
            never = ray.remote(num_cpus=1000)(_nothing).remote()
            threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
            ray.wait([never], timeout=60)
        assert signals.is_unwinding()
        assert getattr(caught.value, "code", 143) == 143


def _throw(error: BaseException) -> None:
    raise error


def _nothing() -> None:
    pass
