"""What a process has started is gone soon after it, however it died."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.platform.process_session import kill_all, processes

STARTER = """
import subprocess, sys, time
from pathlib import Path
from ebbtide.platform.reaper import Reaper

reaper = Reaper()
folder = Path(sys.argv[1])
for name in ("a", "b"):
    (folder / f"{name} folder" / "inner").mkdir(parents=True)
    reaper.files(str(folder / f"{name} folder"))
(folder / "1.sock").touch()
reaper.files(str(folder / "*.sock"))
family = "trap '' TERM INT; sleep 61 & setsid --fork true; sh -c 'set -m; sleep 62 & sleep 63'"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
started = [subprocess.Popen(["sh", "-c", family], **quiet) for _ in range(2)]
for process in started:
    reaper.session(process.pid)
reaper.forget(started[1].pid)
print(*(process.pid for process in (*started, reaper._process)), flush=True)
if "dismiss" in sys.argv:
    sys.stdin.readline()
    reaper.dismiss()
    reaper.dismiss()
else:
    time.sleep(600)
"""


def start(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with a reaper, and the sessions: watched, forgotten, and the reaper's own."""
    command = [sys.executable, "-c", STARTER, str(folder), *arguments]
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    sessions = [int(number) for number in starter.stdout.readline().split()]
    await_that(lambda: [len(processes(session)) for session in sessions[:2]] == [5, 5])
    return starter, sessions


def await_that(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def end(starter: subprocess.Popen[str], sessions: list[int]) -> None:
    starter.kill()
    starter.communicate()
    for session in sessions:
        kill_all(session)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_sessions_and_files_go_with_a_starter_that_dies(
    tmp_path: Path, ending: signal.Signals
) -> None:
    starter, (watched, forgotten, own) = start(tmp_path)
    try:
        (tmp_path / "kept").touch()
        starter.send_signal(ending)
        starter.wait(10)
        await_that(lambda: not processes(own))
        assert processes(watched) == []
        assert len(processes(forgotten)) == 5
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    finally:
        end(starter, [watched, forgotten, own])


def test_a_reaper_that_is_dismissed_leaves_everything_alone(tmp_path: Path) -> None:
    starter, (watched, forgotten, own) = start(tmp_path, "dismiss")
    try:
        starter.communicate("\n", timeout=10)
        assert starter.returncode == 0
        assert processes(own) == []
        assert len(processes(watched)) == 5
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        end(starter, [watched, forgotten, own])
