"""A cluster on this machine: nodes come, go and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.nodes import LABEL_MARKET

CHILD = """
import sys, time
from pathlib import Path
from ebbtide.platform.local_cluster import LocalCluster
with LocalCluster(1, temp_dir=Path(sys.argv[1])) as cluster:
    print(cluster.address, flush=True)
    time.sleep(600)
"""


def await_gone(folder: Path) -> None:
    """No process is left that was started with a path in ``folder``, and nothing lies in it."""
    deadline_s = time.monotonic() + 10
    while left := [*_started_in(folder), *folder.iterdir()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def _started_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [command] if str(folder) in command else []
    return found


def test_labels_are_for_all_nodes_or_for_each() -> None:
    with pytest.raises(ClusterError, match="labels are given for 1 of 2 nodes"):
        LocalCluster(2, labels=[{LABEL_MARKET: "spot"}])


@pytest.mark.ray
def test_a_killed_node_is_dead_within_seconds_and_one_that_is_added_has_its_labels(
    cluster: LocalCluster,
) -> None:
    victim = cluster.nodes[0]
    cluster.kill(victim)
    killed_s = time.monotonic()
    while cluster.is_alive(victim):
        assert time.monotonic() - killed_s < 20
        time.sleep(0.05)
    added = cluster.add_node({LABEL_MARKET: "on_demand"})
    assert cluster.is_alive(added)
    cluster.remove(added)  # it has no price: other tests of the session must not get it
    cluster.restore(4)
    assert victim not in cluster.nodes
    assert all(cluster.is_alive(node) for node in cluster.nodes)
    assert len(cluster.nodes) == 4


@pytest.mark.ray
def test_a_node_that_was_killed_a_moment_ago_is_replaced(cluster: LocalCluster) -> None:
    victim = cluster.nodes[0]
    cluster.kill(victim)
    cluster.restore(4)
    assert victim not in cluster.nodes
    assert len(cluster.nodes) == 4


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_cluster_ends_with_the_process_that_started_it(ending: signal.Signals) -> None:
    folder = Path("/tmp") / f"eb-test-{os.getpid()}"  # sockets need short paths
    folder.mkdir()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        address = child.stdout.readline()
        assert address.startswith("127.0.0.2:")
        child.send_signal(ending)
        child.wait(60)
        child.stdout.close()
        await_gone(folder)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
