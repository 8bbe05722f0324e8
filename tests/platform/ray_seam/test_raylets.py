"""Ray nodes of this machine by their command lines."""

from __future__ import annotations

import pytest

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ray_seam.raylets import parse_command, raylets_here


def test_a_raylet_is_told_from_what_talks_about_one() -> None:
    raylet = ["/lib/ray/core/src/ray/raylet/raylet", "--x=1", "--node_id=ab12", "--gcs-address=h:1"]
    assert parse_command("\0".join([*raylet, ""]).encode()) == ("ab12", "h:1")
    assert parse_command("\0".join(["grep", *raylet]).encode()) is None
    assert parse_command("\0".join(raylet[:3]).encode()) is None
    assert parse_command(b"") is None


@pytest.mark.ray
def test_the_nodes_of_a_cluster_are_found_with_their_sessions(cluster: LocalCluster) -> None:
    found = {
        each.node_id: each.session
        for each in raylets_here()
        if each.control_service == cluster.address
    }
    expected = {node.node_id: node.process.pid for node in cluster.nodes}
    assert expected.items() <= found.items()
    assert len(found) == len(expected) + 1  # the head
