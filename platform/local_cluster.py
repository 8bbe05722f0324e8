"""A Ray cluster of several nodes on this machine, with real processes that can really be killed.

For the demo, the tests and benchmarks. Every node is a ``ray start --block`` in a session of its
own, with its own loopback address, ports and temporary folder, so that nodes can be drained, killed
and added one by one and no other cluster on the machine is disturbed. Promises:
:meth:`LocalCluster.stop` leaves no process, no port and no file; when the process that started the
cluster dies, however it dies, the same is true a few seconds later.

Ray's GCS, raylets, workers and agents listen on all interfaces, without a token (Ray 2.60): they
bind to loopback only for a node whose address is 127.0.0.1 itself, and ``ray start`` replaces that
by the machine's outer one. The rest (client server, dashboard, HTTP servers of its agents) listens
on loopback. Where the network is not trusted, put a firewall before it.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ebbtide.platform import child_process, node_memory, process_session
from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_door import Door
from ebbtide.platform.nodes import (
    LABEL_INSTANCE_TYPE,
    LABEL_LOCAL_NODE,
    LABEL_MARKET,
    LABEL_ZONE,
)
from ebbtide.platform.ports import free_ports
from ebbtide.platform.ray_seam import environment
from ebbtide.platform.ray_seam.fork_early import MODULE as FORK_EARLY
from ebbtide.platform.reaper import Reaper

if TYPE_CHECKING:
    from ebbtide.platform.ray_seam.control_service import ControlService, RayNode

_START_TIMEOUT_S = 120.0
_START_ATTEMPTS = 3
_POLL_S = 0.1
_OBJECT_STORE_BYTES = 100_000_000
_FOLDER_PREFIX = "eb-ray-"

DEFAULT_LABELS: Mapping[str, str] = {
    LABEL_INSTANCE_TYPE: "local-cpu",
    LABEL_MARKET: "spot",
    LABEL_ZONE: "local-a",
}


@dataclass(frozen=True)
class NodeHandle:
    """A worker node that was started here."""

    name: str
    node_id: str
    labels: Mapping[str, str]
    process: subprocess.Popen[bytes]


@dataclass
class _Starting:
    """A node whose raylet has not registered yet."""

    index: int
    labels: Mapping[str, str]
    process: subprocess.Popen[bytes]
    attempts: int = 1

    @property
    def name(self) -> str:
        return f"n{self.index}"


class LocalCluster:
    """``with LocalCluster(nodes=4) as cluster``: a head without CPUs and ``nodes`` worker nodes.

    Starts once. Nodes may be drained, killed and added from any thread.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        cpus_per_node: int = 1,
        labels: Mapping[str, str] | Sequence[Mapping[str, str]] = DEFAULT_LABELS,
        dashboard: bool = False,
        environment: Mapping[str, str] | None = None,
        temp_dir: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._initial = (
            [labels] * nodes if isinstance(labels, Mapping) else [dict(each) for each in labels]
        )
        if len(self._initial) != nodes:
            raise ClusterError(f"labels are given for {len(self._initial)} of {nodes} nodes")
        self._cpus_per_node = cpus_per_node
        self._dashboard = dashboard
        self._environment = dict(environment or {})
        self._parent = temp_dir or Path(tempfile.gettempdir())
        self._clock = clock or SystemClock()
        self._folder = Path()
        self._door: Door | None = None
        self._adding = threading.Lock()
        self._starter = ThreadPoolExecutor(1)  # nodes end with the thread that started them
        self._reaper: Reaper | None = None
        self._node_ids: dict[int, str] = {}
        self._session, self._started = "", 0
        self._head: subprocess.Popen[bytes] | None = None
        self._control: ControlService | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = self._dashboard_port = 0
        self._drained: set[str] = set()
        self.address = ""
        self.nodes: list[NodeHandle] = []

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the head and the nodes. Raises ClusterError with the log of what did not start."""
        if not Path("/proc/self/stat").exists():
            raise ClusterError("a local cluster of several nodes needs Linux")
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=self._parent)
        )
        self._reaper = Reaper()
        try:
            self._reaper.files(glob.escape(str(self._folder)))
            self._start_head()
            self._start_nodes(self._initial)
            self._door = Door(self._folder, lambda: self.add_node().name)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process and remove every file. May be called more than once."""
        if self._door is not None:
            self._door.close()
            self._door = None
        self._starter.shutdown()
        for process in reversed(self._processes):  # the head last
            self._end(process)
        self._processes, self._head, self._control, self.nodes = [], None, None, []
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = Path()
        if self._reaper is not None:
            self._reaper.dismiss()

    @property
    def dashboard_url(self) -> str:
        """Where the dashboard and the Jobs API listen (only with ``dashboard=True``)."""
        if not self._dashboard:
            raise ClusterError("this local cluster was started without a dashboard")
        return f"http://127.0.0.1:{self._dashboard_port}"

    @property
    def folder(self) -> Path:
        """Where the processes keep sessions and logs, until :meth:`stop`."""
        return self._folder

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the cluster's processes, for programs that are run against it."""
        foreign = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {
            **foreign,
            **environment.FAST_FAILURE_DETECTION,
            **environment.QUIET_NODE,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "disabled",  # explicit: a stray token file would switch it on
            "RAY_USAGE_STATS_ENABLED": "0",
            **self._environment,
        }

    # -- nodes -----------------------------------------------------------------------------------

    def add_node(self, labels: Mapping[str, str] = DEFAULT_LABELS) -> NodeHandle:
        """Start one more node and wait until it has joined."""
        with self._adding:
            return self._start_nodes([labels])[0]

    def drain(self, node: NodeHandle, deadline_s: float, reason: str = "spot eviction") -> None:
        """Announce that ``node`` goes away in ``deadline_s`` seconds. The caller ends it then."""
        self._drained.add(node.node_id)
        self._gcs.drain(node.node_id, self._clock.time() + deadline_s, reason)

    def kill(self, node: NodeHandle) -> None:
        """SIGKILL the node: its raylet, its agents and its workers, all at once."""
        self._end(node.process)

    def restore(self, count: int) -> None:
        """Bring the cluster back to ``count`` usable nodes: end drained ones, add or end others."""
        usable = {each.node_id for each in self._gcs.nodes() if each.alive} - self._drained
        for node in list(self.nodes):
            # the cluster counts a node among the living for seconds after its end
            if node.node_id not in usable or process_session.has_ended(node.process):
                self.remove(node)
        for node in self.nodes[count:]:
            self.remove(node)
        if missing := count - len(self.nodes):
            with self._adding:
                self._start_nodes([DEFAULT_LABELS] * missing)

    def remove(self, node: NodeHandle) -> None:
        """Kill a node, wait until the cluster knows it, and forget it."""
        self.kill(node)
        self.nodes.remove(node)
        while self.is_alive(node):
            self._clock.sleep(_POLL_S)

    def is_alive(self, node: NodeHandle) -> bool:
        """Whether the cluster still counts the node among the living."""
        return any(each.alive for each in self._gcs.nodes() if each.node_id == node.node_id)

    def process_names(self) -> list[str]:
        """The command lines of all live processes of the cluster; Ray names its workers there."""
        return [name for each in self._processes for name in process_session.names(each.pid)]

    # -- how -------------------------------------------------------------------------------------

    @property
    def _gcs(self) -> ControlService:
        if self._control is None:
            raise ClusterError("the local cluster is not running")
        return self._control

    def _ray_start(
        self, name: str, folder: Path, *options: str, early: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a node; with ``early`` it imports what workers need while it starts."""
        from ebbtide.platform.ray_seam.ray_start import AgentPorts  # late: it imports Ray

        node_id = secrets.token_hex(28)
        ports = AgentPorts(*free_ports(4))
        if self._session:
            session_dir = folder / self._session
            session_dir.mkdir(parents=True, exist_ok=True)
            ports.announce(str(session_dir), node_id)
        command = [
            *([sys.executable, "-P", "-m", FORK_EARLY] if early else []),
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *ports.options(),
            f"--temp-dir={folder}",
            *options,
        ]
        variables = {**self.environment, **environment.node_id(node_id)}
        if self._reaper is not None:
            self._reaper.files(node_memory.pattern(node_id))
        process = self._starter.submit(self._start_process, name, command, variables).result()
        self._node_ids[process.pid] = node_id
        return process

    def _start_process(
        self, name: str, command: list[str], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """On the starter's thread, which an interrupt does not reach: what runs is known."""
        process = child_process.start(
            command, log=self._folder / f"{name}.log", env=variables, cwd=self._folder
        )
        self._processes.append(process)
        if self._reaper is not None:
            self._reaper.session(process.pid)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process_session.kill(process)
        if process.pid in self._node_ids:
            node_memory.remove(self._node_ids.pop(process.pid))
        if self._reaper is not None:
            self._reaper.forget(process.pid)

    def _start_head(self) -> None:
        from ebbtide.platform.ray_seam.ray_start import session_name  # late: it imports Ray

        attempts, deadline_s = 1, self._clock.monotonic() + _START_TIMEOUT_S
        self._head = self._launch_head()
        while not self._head_answers():
            if process_session.has_ended(self._head) and attempts < _START_ATTEMPTS:
                self._end(self._head)
                attempts, self._control, self._head = attempts + 1, None, self._launch_head()
            else:
                self._expect_running("head", self._head, deadline_s)
            self._clock.sleep(_POLL_S)
        self._session = session_name(self._folder)

    def _launch_head(self) -> subprocess.Popen[bytes]:
        from ebbtide.platform.ray_seam.ray_start import NO_MONITOR  # late: it imports Ray

        self._port, client, self._dashboard_port = free_ports(3)
        self.address = f"127.0.0.2:{self._port}"
        return self._ray_start(
            "head",
            self._folder,
            "--head",
            "--num-cpus=0",
            NO_MONITOR,
            "--node-ip-address=127.0.0.2",
            f"--port={self._port}",
            f"--ray-client-server-port={client}",
            f"--include-dashboard={'true' if self._dashboard else 'false'}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
        )

    def _head_answers(self) -> bool:
        from ebbtide.platform.ray_seam.control_service import ControlService  # late: imports Ray

        if self._control is None:
            try:
                socket.create_connection(("127.0.0.2", self._port), timeout=1.0).close()
            except OSError:
                return False
            self._control = ControlService(self.address)
        return bool(self._control.nodes())

    def _expect_running(
        self, name: str, process: subprocess.Popen[bytes], deadline_s: float
    ) -> None:
        if process_session.has_ended(process) or self._clock.monotonic() > deadline_s:
            log = (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]
            raise ClusterError(f"local cluster: {name} did not start:\n{log}")

    def _launch(self, index: int, labels: Mapping[str, str]) -> subprocess.Popen[bytes]:
        name = f"n{index}"
        text = ",".join(
            f"{key}={value}" for key, value in {**labels, LABEL_LOCAL_NODE: name}.items()
        )
        return self._ray_start(
            name,
            self._folder / name,
            f"--address={self.address}",
            f"--num-cpus={self._cpus_per_node}",
            f"--node-ip-address=127.0.{index // 250}.{index % 250 + 3}",
            f"--labels={text}",
            early=bool(self.nodes),  # it joins a cluster at work
        )

    def _start_nodes(self, labels: Sequence[Mapping[str, str]]) -> list[NodeHandle]:
        """Start nodes, as many at a time as there are cores, and wait for all."""
        waiting = list(labels)
        starting: list[_Starting] = []
        ready: list[NodeHandle] = []
        deadline_s = self._clock.monotonic() + _START_TIMEOUT_S
        while waiting or starting:
            while waiting and len(starting) < (os.cpu_count() or 1):
                index, self._started = self._started, self._started + 1
                chosen = waiting.pop(0)
                starting.append(_Starting(index, chosen, self._launch(index, chosen)))
            registered = {node.labels.get(LABEL_LOCAL_NODE): node for node in self._gcs.nodes()}
            for each in list(starting):
                node: RayNode | None = registered.get(each.name)
                if node is not None and node.alive:
                    ready.append(NodeHandle(each.name, node.node_id, each.labels, each.process))
                    starting.remove(each)
                elif process_session.has_ended(each.process) and each.attempts < _START_ATTEMPTS:
                    self._end(each.process)
                    each.attempts += 1
                    each.process = self._launch(each.index, each.labels)
                else:
                    self._expect_running(each.name, each.process, deadline_s)
            self._clock.sleep(_POLL_S)
        ready.sort(key=lambda node: int(node.name[1:]))
        self.nodes.extend(ready)
        return ready
