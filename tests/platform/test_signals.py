"""Signals give a command its exit code, whatever they meet, and a second one changes nothing.

Each case is a process, started by ``-m`` as ``python -m ebbtide`` is, that signals itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.platform import signals

_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import os, signal, sys
from ebbtide.platform import signals

def send(number, kill=os.kill, pid=os.getpid()):
    kill(pid, number)

class AtTheEnd:
    def __init__(self, number):
        self.number = number
    def __del__(self, send=send):  # the interpreter ends: no handler of Python's is left
        send(self.number)

def swallowed(number):
    try:
        send(number)
    except BaseException:
        pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited
with signals.unwinding():
"""


def end(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose command is ``body``."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "program.py").write_text(_PROGRAM + lines)
    path = os.pathsep.join((str(folder), str(_ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "program"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("send(signal.SIGINT)", 130, id="SIGINT"),
        pytest.param("send(signal.SIGTERM)", 143, id="SIGTERM"),
        pytest.param("raise KeyboardInterrupt", 130, id="an interrupt of a library's own"),
        pytest.param("exec('send(signal.SIGINT)\\nlen([])')", 130, id="in the exec of a string"),
        pytest.param(
            "try:\n    exec('send(signal.SIGINT)\\nlen([])')\nexcept KeyboardInterrupt:\n"
            "    sys.exit(130)",
            130,
            id="in the exec of a string, made an exit code",
        ),
        pytest.param(
            "try:\n    send(signal.SIGINT)\nfinally:\n"
            "    for _ in range(3):\n        send(signal.SIGINT)\n        send(signal.SIGTERM)\n"
            "    print('cleaned')",
            130,
            id="more of both kinds while it cleans up",
        ),
        pytest.param(
            "late = AtTheEnd(signal.SIGINT)\nsend(signal.SIGTERM)",
            143,
            id="another while the interpreter ends",
        ),
        pytest.param(
            "swallowed(signal.SIGINT)\nsend(signal.SIGTERM)", 143, id="one that was swallowed"
        ),
        pytest.param("print('cleaned')", 0, id="none"),
    ],
)
def test_exit_code(tmp_path: Path, body: str, code: int) -> None:
    ended = end(tmp_path, body)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout == ("cleaned\n" if "cleaned" in body else "")


def test_a_sigint_that_is_ignored_from_the_start_stays_so(tmp_path: Path) -> None:
    body = "with signals.kept():\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    body += "    with signals.unwinding():\n        send(signal.SIGINT)\n        print('cleaned')"
    ended = end(tmp_path, body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "cleaned\n", "")


def test_handlers_are_kept() -> None:
    before = [signal.getsignal(number) for number in signals.NUMBERS]
    with signals.kept():
        for number in signals.NUMBERS:
            signal.signal(number, signal.SIG_DFL)
    assert [signal.getsignal(number) for number in signals.NUMBERS] == before
