"""An engine's processes, as the kernel knows them: which they are, and whether one is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ebbtide.platform.process_session import descendants

_NAME = "VLLM::"
"""vLLM calls its engines and their workers so."""


def of_replica(pid: int) -> list[int]:
    """The processes of vLLM below a replica, forked ones too."""
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{each}/comm").read_text().startswith(_NAME):
                found.append(each)
    return found


def is_stopped(pids: Iterable[int]) -> bool:
    """Whether one of the processes is stopped by a signal: it computes nothing until it is
    continued. Not those that a debugger or a profiler holds for a moment."""
    return any(_state(pid) == "T" for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
