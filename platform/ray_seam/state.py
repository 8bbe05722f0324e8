"""What the cluster of this process's driver knows of its nodes and jobs, and Ray does not tell.

Promises: no call waits for longer than a node needs to accept a connection, or half a second.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private.state import state

_PROBE_TIMEOUT_S = 0.5


def head_node() -> str | None:
    """The id of the living head node; None if there is none."""
    for node in ray.nodes():
        if node["Alive"] and HEAD_NODE_RESOURCE_NAME in node["Resources"]:
            return str(node["NodeID"])
    return None


def draining_nodes() -> dict[str, float | None]:
    """The nodes whose end is announced, with the deadline in epoch seconds if one was given."""
    return {
        node_id: deadline_ms / 1000 if deadline_ms else None
        for node_id, deadline_ms in state.get_draining_nodes().items()
    }


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node's raylet accepts connections: known at once, seconds before Ray knows."""
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, _PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def unreachable_nodes(node_ids: Sequence[str]) -> set[str]:
    """Those of the nodes that are dead, or do not answer."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    known = [alive[node_id] for node_id in node_ids if node_id in alive]
    with ThreadPoolExecutor(max(1, min(32, len(known)))) as pool:
        found = zip(known, pool.map(_answers, known), strict=True)
        answering = {node["NodeID"] for node, answers in found if answers}
    return set(node_ids) - answering


def job_is_dead(job_id: str) -> bool:
    """Whether a driver's job has ended, by Ray's own record of it."""
    return not any(job["JobID"] == job_id and not job["IsDead"] for job in state.job_table())
