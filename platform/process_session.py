"""Sessions of processes: every descendant of one that was started with a session of its own.

Process groups do not do for Ray, which gives each worker a group of its own. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from ebbtide.platform.ray_seam.fork_client import NAME, TRACKER

_TRACKER_TIMEOUT_S = 60.0
_SEGMENTS = "/dev/shm/psm_"
_POLL_S = 0.01


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


def names(session: int) -> list[str]:
    """The command lines of a session's live processes."""
    found = []
    for pid in processes(session):
        with contextlib.suppress(OSError):
            command = Path("/proc", str(pid), "cmdline").read_bytes()
            found.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
    return found


def descendants(pid: int) -> list[int]:
    """Live processes below one, and those that one among them stands for, which are forks of
    another (:mod:`ebbtide.platform.ray_seam.fork_client`).
    """
    below: dict[int, list[int]] = {}
    stands_for: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                head, _, tail = (entry / "stat").read_text().rpartition(")")
                name, state, parent = head.partition("(")[2], *tail.split()[:2]
                if state != "Z":
                    below.setdefault(int(parent), []).append(int(entry.name))
                if name.startswith(NAME):
                    stands_for[int(entry.name)] = int(name.removeprefix(NAME))
    found: list[int] = []
    open_ = [pid]
    while open_:
        each = open_.pop()
        own = below.get(each, [])
        if each in stands_for:
            own = [*own, stands_for[each]]
        new = [other for other in own if other not in found]
        found += new
        open_ += new
    return found


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is dead; it stays unreaped, so that its number is not used again."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or bool(os.waitid(os.P_PID, process.pid, flags))


def signal_all(session: int, number: int) -> bool:
    """Send a signal to every live process of a session; whether there was one."""
    alive = processes(session)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(alive)


def kill_all(session: int) -> None:
    """SIGKILL every process of a session until none is left, and remove their shared memory.

    Those that track the shared memory of others (Python's multiprocessing) end by themselves when
    the others have, and remove what these left in /dev/shm; they are killed only if a process
    outside of the session keeps them waiting for a minute. What a process was killed too early to
    tell a tracker of is removed here, unless a process outside has it open.
    """
    deadline_s = None
    segments: set[str] = set()
    while alive := processes(session):
        others = [pid for pid in alive if not _is_tracker(pid)]
        if not others:
            deadline_s = deadline_s or time.monotonic() + _TRACKER_TIMEOUT_S
            others = alive if time.monotonic() > deadline_s else []
            time.sleep(_POLL_S)
        for pid in others:
            segments |= _open_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if left := {name for name in segments if os.path.exists(name)}:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                left -= _open_segments(int(entry.name))
        for name in left:
            Path(name).unlink(missing_ok=True)


def _open_segments(pid: int) -> set[str]:
    """Segments of Python's multiprocessing whose descriptors a process has open, as each keeps."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return {name for name in found if name.startswith(_SEGMENTS)}


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return TRACKER.encode() in Path("/proc", str(pid), "cmdline").read_bytes()
    return False


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL every process of the session that ``process`` leads, until none is left.

    A second call does nothing.
    """
    if process.returncode is None:
        kill_all(process.pid)
        process.wait()
