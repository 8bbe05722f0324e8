"""A cloud for Ray's autoscaler on this machine, whose node types can run out.

Loaded by the autoscaler's own process. While a file of a node type's name lies in the ``closed``
folder, no node of that type is to be had, as in a cloud zone without spot capacity.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from ebbtide.platform import child_process, node_memory, process_session
from ebbtide.platform.ports import free_ports
from ebbtide.platform.ray_seam import environment
from ebbtide.platform.ray_seam.ray_start import AgentPorts, session_name

__all__ = ["FAKE_HEAD_NODE_ID", "SpotProvider"]


class SpotProvider(FakeMultiNodeProvider):  # type: ignore[misc]  # untyped base
    """Ray's provider of fake nodes, with each node a ``ray start`` in a session of its own."""

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        folder, kind = Path(self.provider_config["folder"]), tags[TAG_RAY_USER_NODE_TYPE]
        if (folder / "closed" / kind).exists():
            raise RuntimeError(f"InsufficientInstanceCapacity: no {kind} is to be had")
        with self.lock:
            self._next_node_id += 1
            number = self._next_node_id
        node_id, ports = secrets.token_hex(28), AgentPorts(*free_ports(4))
        temp = folder / f"n{number}"
        session_dir = temp / session_name(folder)
        session_dir.mkdir(parents=True)
        ports.announce(str(session_dir), node_id)
        process = child_process.start(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--block", "--disable-usage-stats", f"--address={self._gcs_address}"),
                *("--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=100000000"),
                *ports.options(),
                f"--temp-dir={temp}",
                f"--num-cpus={resources['CPU']:g}",
                f"--node-ip-address=127.0.0.{number + 2}",
                f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
            ],
            log=folder / f"n{number}.log",
            env={
                **os.environ,
                **environment.node_id(node_id),
                "RAY_CLOUD_INSTANCE_ID": node_id,
                "RAY_NODE_TYPE_NAME": kind,
            },
        )
        new = {
            TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
            TAG_RAY_USER_NODE_TYPE: kind,
            TAG_RAY_NODE_NAME: node_id,
            TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
        }
        with self.lock:
            self._nodes[node_id] = {"tags": {**new, **tags}, "node": process}

    def _terminate_node(self, node: Any) -> None:
        process_session.kill(node["node"])
        node_memory.remove(node["tags"][TAG_RAY_NODE_NAME])
