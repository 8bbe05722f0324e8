"""Sessions of processes are found and ended whole."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from ebbtide.platform import process_session

FAMILY = "sleep 60 & setsid --fork true; sh -c 'set -m; sleep 61 & sleep 62'"


def start(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", command], start_new_session=True)


def test_a_session_is_killed_with_all_its_groups() -> None:
    leader = start(FAMILY)
    deadline_s = time.monotonic() + 10
    while len(process_session.processes(leader.pid)) < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not process_session.has_ended(leader)
    process_session.kill(leader)
    assert process_session.processes(leader.pid) == []
    assert process_session.has_ended(leader)
    process_session.kill(leader)


def test_children_of_a_leader_that_has_ended_are_found() -> None:
    leader = start("sleep 60 & exit 0")
    deadline_s = time.monotonic() + 10
    while not process_session.has_ended(leader):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert len(process_session.processes(leader.pid)) == 1
    process_session.kill(leader)
    assert process_session.processes(leader.pid) == []


SHARED = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=100)
print(segment.name, flush=True)
time.sleep(600)
"""


def test_the_shared_memory_of_what_is_killed_is_removed() -> None:
    command = [sys.executable, "-c", SHARED]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    name = leader.stdout.readline().decode().strip()
    assert Path("/dev/shm", name).exists()
    process_session.kill(leader)
    leader.stdout.close()
    assert not Path("/dev/shm", name).exists()
    assert process_session.processes(leader.pid) == []


UNTRACKED = """
import time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda name, kind: None  # as if killed before it
segment = shared_memory.SharedMemory(create=True, size=100)
print(segment.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_that_no_tracker_knows_is_removed() -> None:
    command = [sys.executable, "-c", UNTRACKED]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    name = leader.stdout.readline().decode().strip()
    process_session.kill(leader)
    leader.stdout.close()
    assert not Path("/dev/shm", name).exists()


def test_shared_memory_of_others_is_left_alone() -> None:
    ours = SharedMemory(create=True, size=100)
    try:
        attach = f"""
import time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda name, kind: None
segment = shared_memory.SharedMemory(name={ours.name!r})
print(segment.name, flush=True)
time.sleep(600)
"""
        command = [sys.executable, "-c", attach]
        leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert leader.stdout is not None and leader.stdout.readline().decode().strip() == ours.name
        process_session.kill(leader)
        leader.stdout.close()
        assert Path("/dev/shm", ours.name).exists()
    finally:
        ours.close()
        ours.unlink()


def test_descendants_are_those_that_one_stands_for_as_well() -> None:
    other = start("sleep 60")
    name = f"echo -n fork-{other.pid} > /proc/self/comm; sleep 61; true"
    leader = start(f"sh -c '{name}' & wait")
    try:
        deadline_s = time.monotonic() + 10
        while other.pid not in (found := process_session.descendants(leader.pid)):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.01)
        assert other.pid not in process_session.processes(leader.pid)
    finally:
        process_session.kill(leader)
        process_session.kill(other)
