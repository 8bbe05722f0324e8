"""Nothing but the result reaches standard output."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

from ebbtide.commands import stdout

NOISY = """
import os, subprocess, sys
from ebbtide.commands import stdout

print("before")
with stdout.reserved() as result:
    print("printed")
    os.write(1, b"native\\n")
    subprocess.run(["echo", "child"], check=True)
    print("result", file=result, flush=True)
    print("more ü", file=result)
print("after")
os.write(1, b"native after\\n")
"""


def test_prints_of_every_kind_go_to_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", NOISY],
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    )
    assert sorted(done.stdout.split("\n")) == sorted(
        ["before", "result", "more ü", "after", "native after", ""]
    )
    assert sorted(done.stderr.split()) == ["child", "native", "printed"]


def test_streams_in_memory_are_served_too() -> None:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        stdout.reserved() as result,
    ):
        print("noise")
        print("result", file=result)
    assert (out.getvalue(), err.getvalue()) == ("result\n", "noise\n")
