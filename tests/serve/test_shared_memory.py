"""Segments are removed although their makers are killed with all their children, as by Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

REPLICA = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
from ebbtide.serve.shared_memory import detach_tracker

def engine(pipe):
    segment = SharedMemory(create=True, size=100)
    pipe.send(segment.name)
    time.sleep(600)

if __name__ == "__main__":
    detach_tracker()
    segment = SharedMemory(create=True, size=100)
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=engine, args=(there,)).start()
    print(segment.name, here.recv(), flush=True)
    time.sleep(600)
"""


def test_segments_go_with_a_replica_that_is_killed_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert replica.stdout is not None
    segments = [Path("/dev/shm", name) for name in replica.stdout.readline().split()]
    assert len(segments) == 2 and all(segment.exists() for segment in segments)
    family = [*psutil.Process(replica.pid).children(), psutil.Process(replica.pid)]
    assert not any("resource_tracker" in " ".join(each.cmdline()) for each in family)
    for process in family:
        process.send_signal(signal.SIGKILL)
    replica.communicate()
    deadline_s = time.monotonic() + 10
    while any(segment.exists() for segment in segments):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
