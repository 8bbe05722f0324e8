"""Folders for what a process needs for a while, which do not outlive it for long.

Promises: a folder goes with its block; what a killed process left is removed by the next process of
the same user on the machine that needs one. A folder in use is never touched: its process holds a
lock on it (``flock``), which the kernel takes back however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "ebbtide-scratch-"
_YOUNG_S = 60.0
"""A folder's process has so long to take the lock."""


@contextlib.contextmanager
def scratch_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """An empty folder in the machine's temporary one (or in ``parent``), named after its purpose.

    Raises OSError if it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent)
    with tempfile.TemporaryDirectory(
        prefix=f"{_PREFIX}{purpose}-", dir=parent, ignore_cleanup_errors=True
    ) as name:
        lock = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders whose process is gone, except for very young ones."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if time.time() - path.stat().st_mtime > _YOUNG_S and not _is_in_use(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_in_use(path: Path) -> bool:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
