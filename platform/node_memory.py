"""Where runs keep copies in a node's memory: folders in /dev/shm, named by run and node.

They are as mortal as the node: whoever ends a node of this machine removes them, and a process
whose node it is takes them along, however it dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ebbtide.platform.reaper import Reaper

ROOT = Path("/dev/shm")
PREFIX = "ebbtide-memory-"
_STALE_S = 3600.0


def folder(run_uri: str, node_id: str, root: Path = ROOT) -> Path:
    """The folder of a run on a node."""
    run = hashlib.sha256(run_uri.encode()).hexdigest()[:16]
    return root / f"{PREFIX}{run}-{node_id[:32]}"


def pattern(node_id: str, root: Path = ROOT) -> str:
    """A glob of the folders of all runs on a node."""
    return f"{root}/{PREFIX}*-{node_id[:32]}"


def remove(node_id: str, root: Path = ROOT) -> None:
    """The node is gone."""
    for found in root.glob(Path(pattern(node_id)).name):
        shutil.rmtree(found, ignore_errors=True)


@contextlib.contextmanager
def owned(node_id: str, root: Path = ROOT) -> Iterator[None]:
    """The node ends with this block, or with this process, even by SIGKILL."""
    reaper = Reaper()
    reaper.files(pattern(node_id, root))
    try:
        yield
    finally:
        remove(node_id, root)
        reaper.dismiss()


def remove_stale(root: Path = ROOT) -> None:
    """Remove what runs left that were never taken up again: untouched for an hour."""
    for found in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            newest_s = max(each.stat().st_mtime for each in (found, *found.iterdir()))
            if time.time() - newest_s > _STALE_S:
                shutil.rmtree(found, ignore_errors=True)
