"""An S3 server on this machine leaves nothing, however its starter ends."""

from __future__ import annotations

import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SOCKETS = Path("/tmp")  # where SeaweedFS puts them, whatever TMPDIR says
CHILD = """
import time
from ebbtide.platform.local_s3 import LocalS3
with LocalS3() as server:
    print(server.endpoint, server._folder, server._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(ending: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    endpoint, folder, pid = child.stdout.readline().split()
    port = int(endpoint.rpartition(":")[2])
    assert folder.startswith(tempfile.gettempdir())
    assert not list(SOCKETS.glob(f"seaweedfs-s3-{port}.sock"))
    sockets = str(SOCKETS / f"seaweedfs-*-{port + 10_000}.sock")
    deadline_s = time.monotonic() + 60  # it answers by TCP before it has all of its sockets
    while not (Path(folder) / "s3.sock").exists() or not glob.glob(sockets):
        assert time.monotonic() < deadline_s, os.listdir(folder)
        time.sleep(0.05)
    child.send_signal(ending)
    child.wait(30)
    child.stdout.close()
    deadline_s = time.monotonic() + 60
    while left := [
        path for path in (folder, f"/proc/{pid}", *glob.glob(sockets)) if Path(path).exists()
    ]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
