"""``ebbtide agent`` on a real node, told by a server that speaks AWS's protocol."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_metadata import LocalMetadata
from ebbtide.platform.ray_seam.control_service import ControlService
from ebbtide.platform.ray_seam.state import draining_nodes


@contextmanager
def agent(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ebbtide", "agent", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Busy:
    """Keeps its node from ending as soon as it is drained."""

    def is_there(self) -> bool:
        return True


def next_event(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the agent ended"
    event: dict[str, Any] = json.loads(line)
    return event


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    command = [sys.executable, "-m", "ebbtide", "agent", "--endpoint", "169.254.169.254"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "write http://HOST[:PORT]" in done.stderr


@pytest.mark.ray
def test_a_notice_drains_the_node_with_its_deadline_until_sigterm(cluster: LocalCluster) -> None:
    node = cluster.nodes[0]
    ray.init(address=cluster.address, log_to_driver=False)
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    worker = ray.remote(Busy).options(num_cpus=1, scheduling_strategy=here).remote()
    ray.get(worker.is_there.remote())
    with (
        LocalMetadata("aws") as service,
        agent("--endpoint", service.endpoint, "--node-id", node.node_id) as process,
    ):
        assert next_event(process)["event"] == "watching"
        service.instance.recommend_rebalance("2026-03-01T12:00:00Z")
        assert next_event(process)["event"] == "rebalance"
        deadline_s = int(time.time()) + 110
        text = datetime.fromtimestamp(deadline_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        service.instance.interrupt("terminate", text)
        assert next_event(process)["event"] == "notice"
        draining = next_event(process)
        assert draining["event"] == "draining"
        assert draining["node_id"] == node.node_id
        assert draining["deadline_s"] == deadline_s

        assert draining_nodes() == {node.node_id: deadline_s}
        since_s = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
        assert ControlService(cluster.address).nodes_at_risk() == {node.node_id: since_s}

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    cluster.remove(node)
    assert ControlService(cluster.address).nodes_at_risk() == {}
