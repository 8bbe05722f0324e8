"""What a process starts ends with it, in whatever way it dies.

A :class:`Reaper` is told which sessions and files its process has. The small process that it runs
(this module again, standard library only) waits for the end of a pipe that the starter alone holds
open. When the starter is gone without :meth:`Reaper.dismiss`, even by SIGKILL, it kills the
sessions and removes the files, within a second. A fork of the starter without exec puts that off
for as long as it lives.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import ebbtide
from ebbtide.platform import process_session

_SESSION, _FORGET, _FILES, _DISMISS = "session", "forget", "files", "dismiss"


class Reaper:
    """Starts its process at once. Not for several threads at the same time."""

    def __init__(self) -> None:
        root = Path(str(ebbtide.__file__)).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(root)},
            start_new_session=True,
        )

    def session(self, number: int) -> None:
        """From now on the session goes with the starter."""
        self._say(_SESSION, str(number))

    def forget(self, number: int) -> None:
        """The session is at its end; another may get its number."""
        self._say(_FORGET, str(number))

    def files(self, pattern: str) -> None:
        """From now on the files and folders that match the glob go with the starter."""
        self._say(_FILES, pattern)

    def dismiss(self) -> None:
        """The starter has ended everything itself. May be called more than once."""
        if self._process.returncode is None:
            self._say(_DISMISS)
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()

    def _say(self, *words: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # killed: what is told goes without it
            pipe.write(os.fsencode(" ".join(words)) + b"\n")
            pipe.flush()


def _watch(lines: Iterable[bytes]) -> None:
    """Follow what the starter says until it is gone."""
    sessions: set[int] = set()
    patterns: list[str] = []
    for line in lines:
        verb, _, value = os.fsdecode(line.removesuffix(b"\n")).partition(" ")
        if verb == _SESSION:
            sessions.add(int(value))
        elif verb == _FORGET:
            sessions.discard(int(value))
        elif verb == _FILES:
            patterns.append(value)
        elif verb == _DISMISS:
            return
    for session in sessions:
        if sys.platform == "linux":
            process_session.kill_all(session)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
    for path in [Path(name) for pattern in patterns for name in glob.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    _watch(sys.stdin.buffer)
