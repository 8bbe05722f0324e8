"""Segments are removed although their makers are killed as Ray kills: children and group first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

REPLICA = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory
from ebbtide.serve.shared_memory import detach_tracker

def engine(pipe):
    os.setpgid(0, 0)
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


def test_segments_go_when_an_engine_outlives_its_replica_and_the_group(tmp_path: Path) -> None:
    """Ray kills a replica, its children and its group while an engine is still about to end."""
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        process_group=0,
    )
    assert replica.stdout is not None
    segments = [Path("/dev/shm", name) for name in replica.stdout.readline().split()]
    assert len(segments) == 2 and all(segment.exists() for segment in segments)
    (engine,) = psutil.Process(replica.pid).children()
    os.killpg(replica.pid, signal.SIGKILL)
    replica.wait()
    engine.kill()
    replica.stdout.close()
    deadline_s = time.monotonic() + 60
    while any(segment.exists() for segment in segments):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
