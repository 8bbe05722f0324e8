"""What a driver can know of its cluster is told where it is looked for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from ebbtide.platform.local_cluster import LocalCluster
from tests.platform.ray_seam.pins import Pins

PINS = Pins("state")


def test_rays_record_of_the_cluster_has() -> None:
    record = "ray._private.state:GlobalState"
    PINS.takes(f"{record}.get_draining_nodes", "self", others=False)
    PINS.takes(f"{record}.job_table", "self", others=False)
    PINS.says(f"{record}.job_table", '"JobID"', '"IsDead"')


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_nodes_that_are_dead_or_do_not_answer_are_unreachable(
    monkeypatch: pytest.MonkeyPatch, listening: socket.socket
) -> None:
    def node(node_id: str, port: int, alive: bool = True) -> dict[str, Any]:
        address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        return {"NodeID": node_id, "Alive": alive, **address}

    port = int(listening.getsockname()[1])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nodes = [node("up", port), node("dead", port, False)]
        nodes.append(node("silent", silent.getsockname()[1]))
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        found = PINS.own("unreachable_nodes")(["up", "dead", "silent", "unknown"])
    assert found == {"dead", "silent", "unknown"}


@pytest.mark.ray
def test_the_head_and_the_end_of_a_job_are_known(cluster: LocalCluster) -> None:
    state = PINS.own("")
    ray.init(address=cluster.address, log_to_driver=False)
    head = state.head_node()
    assert head is not None and head not in {node.node_id for node in cluster.nodes}
    assert state.unreachable_nodes([head, "unknown"]) == {"unknown"}
    job = ray.get_runtime_context().get_job_id()
    assert not state.job_is_dead(job)
    assert state.job_is_dead("ffffffff")
    assert state.draining_nodes() == {}
    ray.shutdown()
    ray.init(address=cluster.address, log_to_driver=False)
    assert state.job_is_dead(job)
