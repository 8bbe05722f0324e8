"""The commands that the demo types: each is a process of its own, and none outlives the demo."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from ebbtide.platform.errors import EbbtideError

_STOP_TIMEOUT_S = 30.0


class Shell:
    """Runs ``ebbtide ...`` in the demo's environment; progress passes through to stderr.

    A context manager: at its end every command that still runs is told to end (as by Ctrl-C) and,
    if it does not, killed with all it started.
    """

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self._console = console
        self._environment = {**os.environ, **environment}
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; its stdout is a pipe of text."""
        shown = shlex.join(["ebbtide", *(_short(argument) for argument in arguments)])
        self._console.print(f"[bold]$ {shown}", highlight=False, soft_wrap=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "ebbtide", *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def run(self, *arguments: str) -> str:
        """Run a command to its end and give its stdout. Raises EbbtideError if it failed."""
        return self.finish(self.start(*arguments))

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for a started command and give its stdout. Raises EbbtideError if it failed."""
        output, _ = process.communicate()
        self._running.remove(process)
        if process.returncode != 0:
            command = shlex.join(process.args[2:]) if isinstance(process.args, list) else ""
            raise EbbtideError(f"{command} ended with exit code {process.returncode}; see above")
        return output

    def stop(self, process: subprocess.Popen[str]) -> None:
        """End a command in order (SIGINT), or by SIGKILL if it does not end."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._running.remove(process)

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._running):
            self.stop(process)


def _short(argument: str) -> str:
    """A path under the current directory, as a person would type it."""
    path = Path(argument.partition("=")[2] or argument)
    if not path.is_absolute() or not path.is_relative_to(Path.cwd()):
        return argument
    return argument.replace(str(path), str(path.relative_to(Path.cwd())))


class Stages:
    """Says which part of the demo is at work, and how long it has been."""

    def __init__(self, console: Console, count: int) -> None:
        self._console, self._count, self._at = console, count, 0
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._start_s

    def begin(self, title: str) -> None:
        """Announce the next part."""
        self._at += 1
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        self._console.rule(f"[{self._at}/{self._count}] {title} · {minutes}:{seconds:02d}")
