"""Sessions of processes: every descendant of one that was started with a session of its own.

Process groups do not do for Ray, which gives each worker a group of its own. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def processes(session: int) -> list[int]:
    """Live processes of a session, which has the number of the process that leads it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is dead; it stays unreaped, so that its number is not used again."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or bool(os.waitid(os.P_PID, process.pid, flags))


def kill_all(session: int) -> None:
    """SIGKILL every process of a session until none is left."""
    while alive := processes(session):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL every process of the session that ``process`` leads, until none is left.

    A second call does nothing.
    """
    if process.returncode is None:
        kill_all(process.pid)
        process.wait()
