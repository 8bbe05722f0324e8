"""Standard output is for a command's result alone.

Ray prints there what its nodes and workers say, at any time while this process is connected, and
libraries print what they like; a ``--json`` document among that could not be read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def reserved() -> Iterator[TextIO]:
    """Yields standard output; whatever else writes there meanwhile, from Python, from native code
    or from a child process, writes to standard error."""
    stdout = sys.stdout
    stdout.flush()
    with contextlib.ExitStack() as stack:
        if _is_descriptor(stdout, 1) and _is_descriptor(sys.stderr, 2):
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
            stdout = stack.enter_context(
                open(os.dup(kept), "w", encoding=stdout.encoding, errors=stdout.errors)
            )
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield stdout


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):  # a stream in memory, or closed
        return False
