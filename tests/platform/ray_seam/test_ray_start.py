"""``ray start`` has the hidden options that are used, and agents are announced where it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.platform.ray_seam.pins import Pins

PINS = Pins("ray_start")


@pytest.fixture
def ports() -> Any:
    return PINS.own("AgentPorts")(dashboard_listen=1, dashboard_grpc=2, runtime_env=3, metrics=4)


def test_the_command_has_the_options(ports: Any) -> None:
    known = {
        each for option in PINS.find("ray.scripts.scripts:start").params for each in option.opts
    }
    used = [PINS.own("NO_MONITOR"), *(option.partition("=")[0] for option in ports.options())]
    PINS.knows(known, used, "ray start")


def test_the_agents_find_the_ports_that_were_announced(tmp_path: Path, ports: Any) -> None:
    wait_for = PINS.find("ray._raylet:wait_for_persisted_port")
    node_id = "ab" * 28
    ports.announce(str(tmp_path), node_id)
    names = ["DASHBOARD_AGENT_LISTEN", "METRICS_AGENT", "RUNTIME_ENV_AGENT", "METRICS_EXPORT"]
    found = [
        wait_for(str(tmp_path), node_id, PINS.find(f"ray._raylet:{name}_PORT_NAME"), 1000, 10)
        for name in names
    ]
    assert found == [1, 2, 3, 4]


def test_the_newest_session_is_linked(tmp_path: Path) -> None:
    (tmp_path / "session_2026-01-01").mkdir()
    (tmp_path / "session_latest").symlink_to("session_2026-01-01")
    assert PINS.own("session_name")(tmp_path) == "session_2026-01-01"
    PINS.says("ray._private.node", "SESSION_LATEST")
