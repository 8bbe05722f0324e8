"""The Ray nodes that run on this machine: found by their raylets' command lines. Linux only.

Ray writes a node's id and the address of its cluster's control service (GCS) on the command line of
its raylet. That names the nodes that go when this machine goes, without asking anyone, and whatever
addresses the machine has.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_NODE_ID, _CONTROL_SERVICE = "--node_id=", "--gcs-address="


@dataclass(frozen=True)
class Raylet:
    """A node's daemon; ``session`` is the process that leads its session: ``ray start --block``."""

    pid: int
    session: int
    node_id: str
    control_service: str
    """HOST:PORT of its cluster's GCS."""


def parse_command(command: bytes) -> tuple[str, str] | None:
    """Node id and GCS address from ``/proc/PID/cmdline``; None if it is no raylet's."""
    name, *arguments = command.decode(errors="replace").split("\0")
    found = [
        argument.removeprefix(option)
        for option in (_NODE_ID, _CONTROL_SERVICE)
        for argument in arguments
        if argument.startswith(option)
    ]
    return (found[0], found[1]) if Path(name).name == "raylet" and len(found) == 2 else None


def raylets_here() -> list[Raylet]:
    """Every live raylet on this machine that this user may see, by process number."""
    raylets = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if named := parse_command((entry / "cmdline").read_bytes()):
                    pid = int(entry.name)
                    raylets.append(Raylet(pid, os.getsid(pid), *named))
    return sorted(raylets, key=lambda raylet: raylet.pid)
