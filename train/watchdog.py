"""A rank that stops moving (SIGSTOP, a debugger, a driver that hangs in the kernel) is killed.

Its peers would wait for it in a collective for many minutes. A killed rank, however, they notice at
once, and the run goes on as after any kill. The watcher is a small process of its own beside the
rank; it needs neither the network nor Ray, and it ends with the rank.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

_BEAT_S = 0.5
_LEAST_S = 5.0
_STEPS = 3
_UNKNOWN_S = 60.0
"""Before the first step: it imports, compiles and connects."""


def limit_s(step_s: float | None) -> float:
    """How long a rank may stand still: three steps, at least 5 s."""
    return _UNKNOWN_S if step_s is None else max(_LEAST_S, _STEPS * step_s)


class Watchdog:
    """``with Watchdog("rank 0") as dog:`` this process beats; tell ``dog.step_s`` what steps take.

    It watches whether the process runs at all, not whether the training thread comes further: for
    that there is the process group's time-out.
    """

    def __init__(self, name: str) -> None:
        self.step_s: float | None = None
        script = Path(__file__).with_name("watchdog_child.py")
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), name], stdin=subprocess.PIPE
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ebbtide-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        self._child.wait()

    def _beat(self) -> None:
        assert self._child.stdin is not None
        with self._child.stdin as pipe, contextlib.suppress(BrokenPipeError):
            while not self._closed.is_set():
                pipe.write(f"{limit_s(self.step_s)}\n".encode())
                pipe.flush()
                self._closed.wait(_BEAT_S)
