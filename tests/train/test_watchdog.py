"""A process that stops is killed by its watcher; one that moves, or ends, is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ebbtide.train.watchdog import limit_s

WATCHED = """
import sys, time
from ebbtide.train.watchdog import Watchdog
dog = Watchdog("rank 7")
dog.step_s = 0.1
with dog:
    print("up", flush=True)
    sys.stdin.read()
print("over", flush=True)
"""


def start() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def is_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(("step_s", "limit"), [(None, 60.0), (0.1, 5.0), (4.0, 12.0)])
def test_the_limit_is_three_steps_and_at_least_five_seconds(
    step_s: float | None, limit: float
) -> None:
    assert limit_s(step_s) == limit


def test_a_stopped_process_is_killed() -> None:
    process = start()
    (watcher,) = children(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert said == "rank 7 has not moved for 5 s: killed\n"
    assert is_gone(watcher)


def test_a_short_stop_and_an_end_are_left_alone() -> None:
    process = start()
    (watcher,) = children(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGCONT)
    out, said = process.communicate("", timeout=60)
    assert (process.returncode, out, said) == (0, "over\n", "")
    assert is_gone(watcher)


def test_the_watcher_ends_with_a_killed_process() -> None:
    process = start()
    (watcher,) = children(process.pid)
    process.kill()
    process.communicate(timeout=60)
    assert is_gone(watcher)
