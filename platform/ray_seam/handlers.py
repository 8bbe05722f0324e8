"""SIGTERM in a driver stays what it was, also while ``ray.init`` is at work.

Ray installs handlers of its own there, which exit with 15 or 1. Blocking the signal does not keep
it from them: another thread of the process takes it. And what Ray starts would inherit the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ray._private.utils

from ebbtide.platform import signals


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Around ``ray.init``."""
    before = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = _leave_out
    try:
        with signals.kept():  # against what is set in native code
            yield
    finally:
        ray._private.utils.set_sigterm_handler = before


def _leave_out(handler: Callable[..., Any]) -> None:
    """In place of Ray's function that installs one."""
