"""A node on which workers are forked: a shell plays the raylet, the parent of the clients.

With its end all ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.platform.ray_seam import fork_client, fork_early

T = TypeVar("T")
LIMIT_S = 120.0
WORKER = """
import json, os, random, signal, sys
report = {
    "pid": os.getpid(), "group": os.getpgid(0), "parent": os.getppid(), "argv": sys.argv,
    "folder": os.getcwd(), "environment": dict(os.environ), "path": sys.path, "name": __name__,
    "modules": sorted(set(sys.modules) & {"heavy", "broken", "threads"}),
    "state": list(sys.modules["heavy"].state) if "heavy" in sys.modules else None,
    "numpy": sys.modules["numpy"].random.random() if "numpy" in sys.modules else None,
    "random": random.random(), "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
}
if "heavy" in sys.modules:
    sys.modules["heavy"].state.append(os.getpid())
print("said on stdout", flush=True)
print("said on stderr", file=sys.stderr, flush=True)
os.write(os.open(sys.argv[1] + ".new", os.O_WRONLY | os.O_CREAT), json.dumps(report).encode())
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    signal.pause()
"""


def until(look: Callable[[], T]) -> T:
    """What ``look`` finds once it finds something."""
    end_s = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < end_s, "nothing has come of it"
        time.sleep(0.01)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Node:
    """A raylet's part: it starts clients, each in a process group of its own.

    ``early``: what the node imports while it starts.
    """

    def __init__(self, folder: Path, early: str | None = None) -> None:
        self.folder = folder
        self.count = 0
        (folder / "worker.py").write_text(WORKER)
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
            "PATH": os.environ["PATH"],
            fork_client.MODULES: "heavy",
        }
        starter = [] if early is None else [sys.executable, "-P", "-m", fork_early.MODULE]
        with (folder / "stderr").open("w") as errors:
            self.shell = subprocess.Popen(
                [*starter, "bash"],
                env=os.environ
                if early is None
                else self.environment | {fork_early.IMPORTED: early},
                stdin=-1,
                stdout=-1,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        if early is not None:
            self.environment |= {fork_client.EARLY: self.told(fork_client.EARLY), "SPT_NOENV": "1"}

    def told(self, variable: str) -> str:
        """What the shell has been given as a variable."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        print(f"echo ${variable}", file=self.shell.stdin, flush=True)
        return str(self.shell.stdout.readline().strip())

    def module(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def start(self, **environment: str) -> tuple[int, dict[str, Any]]:
        """A client's process number, and what its worker says."""
        self.count += 1
        report = self.folder / f"report{self.count}"
        variables = " ".join(f"{k}={v}" for k, v in (self.environment | environment).items())
        assert self.shell.stdin is not None and self.shell.stdout is not None
        print(
            f"set -m; cd {self.folder}; env -i {variables} {sys.executable} -I -S "
            f"{fork_client.__file__} worker.py {report} >{report}.out 2>{report}.err & echo $!",
            file=self.shell.stdin,
            flush=True,
        )
        pid = int(self.shell.stdout.readline())
        until(report.exists)
        return pid, json.loads(report.read_text())

    def errors(self, number: int) -> str:
        return (self.folder / f"report{number}.err").read_text()

    def processes(self) -> list[int]:
        found = subprocess.run(
            ["ps", "-s", str(self.shell.pid), "-o", "pid=,stat="], capture_output=True, text=True
        )
        rows = [line.split() for line in found.stdout.splitlines()]
        return [int(pid) for pid, state in rows if not state.startswith("Z")]


def imports(node: Node) -> int:
    return len((node.folder / "imported").read_text().split())


@contextlib.contextmanager
def ended(node: Node) -> Iterator[Node]:
    """The node, until the test's end, however that comes."""
    try:
        yield node
    finally:
        node.shell.kill()
        node.shell.communicate()
        for pid in node.processes():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not node.processes())
