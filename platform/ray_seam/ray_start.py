"""What starting a node by ``ray start`` needs beyond the command's documented options.

Promises: a node's agents listen where they were told to, and are waited for as long as they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import SESSION_LATEST
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, not in its stub
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

NO_MONITOR = "--no-monitor"
"""The option for a head without a process that autoscales; its port would be open to all."""


@dataclass(frozen=True)
class AgentPorts:
    """The ports of a node's agents, where they are fixed ahead."""

    dashboard_listen: int
    dashboard_grpc: int
    runtime_env: int
    metrics: int

    def announce(self, session_dir: str, node_id: str) -> None:
        """Write them where the agents would. Without it a raylet gives up on agents that take 15 s.

        ``session_dir`` is the node's own and exists.
        """
        for name, port in (
            (DASHBOARD_AGENT_LISTEN_PORT_NAME, self.dashboard_listen),
            (METRICS_AGENT_PORT_NAME, self.dashboard_grpc),
            (RUNTIME_ENV_AGENT_PORT_NAME, self.runtime_env),
            (METRICS_EXPORT_PORT_NAME, self.metrics),
        ):
            persist_port(session_dir, node_id, name, port)

    def options(self) -> list[str]:
        """The options of ``ray start`` that fix them."""
        return [
            f"--dashboard-agent-listen-port={self.dashboard_listen}",
            f"--dashboard-agent-grpc-port={self.dashboard_grpc}",
            f"--runtime-env-agent-port={self.runtime_env}",
            f"--metrics-export-port={self.metrics}",
        ]


def session_name(temp_dir: Path) -> str:
    """The name of the session whose head keeps its files in ``temp_dir``; every node has it."""
    return Path(temp_dir, SESSION_LATEST).resolve().name
