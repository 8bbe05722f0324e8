"""A Ray cluster on this machine that Ray's own autoscaler (version 2) grows and shrinks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ebbtide.platform import child_process, node_memory, process_session
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET, LABEL_ZONE
from ebbtide.platform.ports import free_ports
from ebbtide.platform.ray_seam import environment
from ebbtide.platform.ray_seam.control_service import ControlService, RayNode
from ebbtide.platform.ray_seam.ray_start import AgentPorts
from ebbtide.platform.ray_seam.raylets import raylets_here
from ebbtide.platform.reaper import Reaper

_HEAD = "f" * 51 + "00000"  # as Ray's provider of fake nodes calls it
_START_TIMEOUT_S = 120.0
_LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
    *("cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


def node_type(market: str, zone: str, most: int) -> dict[str, Any]:
    """A node type of one CPU."""
    labels = {LABEL_INSTANCE_TYPE: "local-cpu", LABEL_MARKET: market, LABEL_ZONE: zone}
    return {
        "min_workers": 0,
        "max_workers": most,
        "resources": {"CPU": 1},
        "labels": labels,
        "node_config": {},
    }


class AutoscalingCluster:
    """``with AutoscalingCluster(folder, types) as cluster:`` a head; nodes come as they are asked
    for. An idle node is ended after ``idle_s``."""

    def __init__(self, folder: Path, types: Mapping[str, Any], idle_s: float = 4.0) -> None:
        self._folder, self._types, self._idle_s = folder, types, idle_s
        self._port, self._client = free_ports(2)
        self.address = f"127.0.0.2:{self._port}"
        self._head: subprocess.Popen[bytes] | None = None
        self._control = ControlService(self.address)
        self._reaper = Reaper()
        (folder / "closed").mkdir()

    def __enter__(self) -> AutoscalingCluster:
        settings = self._folder / "autoscaler.yaml"
        settings.write_text(json.dumps(self._settings()))  # JSON is YAML
        command = [
            str(Path(sys.executable).with_name("ray")),
            *("start", "--head", "--block", "--disable-usage-stats", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.2", f"--port={self._port}"),
            f"--ray-client-server-port={self._client}",
            *("--include-dashboard=false", "--object-store-memory=100000000"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            *AgentPorts(*free_ports(4)).options(),
            f"--temp-dir={self._folder}",
            f"--autoscaling-config={settings}",
        ]
        log = self._folder / "head.log"
        self._head = child_process.start(command, log=log, env=self.environment)
        self._reaper.session(self._head.pid)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            assert not process_session.has_ended(self._head), log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        known = set[str]()
        with contextlib.suppress(ClusterError):  # the head is gone
            known = {node.node_id for node in self._control.nodes()}  # dead ones, too
        if self._head is not None:
            process_session.kill(self._head)  # first, or it would start new nodes
        while raylets := self._raylets():
            for raylet in raylets:
                process_session.kill_all(raylet.session)
        for node_id in known:
            node_memory.remove(node_id)
        self._reaper.dismiss()

    @property
    def environment(self) -> dict[str, str]:
        """Of the cluster's processes, and of programs that are run against it."""
        foreign = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {
            **foreign,
            **environment.FAST_FAILURE_DETECTION,
            **environment.QUIET_NODE,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.getcwd(),
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            **environment.node_id(_HEAD),
        }

    def nodes(self, market: str | None = None) -> list[RayNode]:
        """The living nodes, of a market or all, without the head."""
        return [
            node
            for node in self._control.nodes()
            if node.alive
            and node.node_id != _HEAD
            and market in (None, node.labels.get(LABEL_MARKET))
        ]

    def close(self, name: str, market: str) -> None:
        """From now on there is no node of this type to be had, and those of the market vanish."""
        (self._folder / "closed" / name).touch()
        gone = {node.node_id for node in self.nodes(market)}
        for raylet in self._raylets():
            if raylet.node_id in gone:
                process_session.kill_all(raylet.session)
                node_memory.remove(raylet.node_id)

    def kill(self, named: str) -> int:
        """SIGKILL the head's processes with this in their title; how many there were."""
        assert self._head is not None
        killed = 0
        for pid in process_session.processes(self._head.pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if named.encode() in Path("/proc", str(pid), "cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        return killed

    def open(self, name: str) -> None:
        """Nodes of this type are to be had again."""
        (self._folder / "closed" / name).unlink()

    def logs(self) -> str:
        """What the autoscaler said last."""
        found = sorted(self._folder.glob("session_latest/logs/monitor.*"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in found)

    def _settings(self) -> dict[str, Any]:
        return {
            "cluster_name": "spot",
            "max_workers": 8,
            "upscaling_speed": 100.0,
            "idle_timeout_minutes": self._idle_s / 60,
            "provider": {
                "type": "external",
                "module": "tests.platform.ray_seam.spot_provider.SpotProvider",
                "folder": str(self._folder),
                "gcs_address": self.address,
                "head_node_id": _HEAD,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "auth": {},
            "head_node_type": "ray.head.default",
            "available_node_types": {
                **self._types,
                "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            },
            "file_mounts": {},
            **{name: [] for name in _LISTS},
        }

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.2", self._port), timeout=1.0).close()
        except OSError:
            return False
        return bool(self._control.nodes())

    def _raylets(self) -> list[Any]:
        return [r for r in raylets_here() if r.control_service == self.address]
