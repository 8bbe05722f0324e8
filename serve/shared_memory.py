"""Shared memory of engines, which is removed however they end.

Python's multiprocessing has a process that removes the segments of others when these are gone, its
resource tracker. But when a replica ends, Ray kills its children and, 0.2 s later, its process
group (Ray 2.60, ``process_group_cleanup_enabled``): a tracker among them dies before engines that
take longer to end, and their segments stay in /dev/shm for ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import resource_tracker, util

_DETACH = "import os;os.setpgid(0,0);os.fork() and os._exit(0);"


def detach_tracker() -> None:
    """Start this process's tracker, which its children will share, as no child of its own and in a
    process group of its own. It stays in the session, whose end waits for it.

    To be called before anything of multiprocessing is used. The tracker ends when this process and
    its children have.
    """
    spawn = util.spawnv_passfds

    def spawn_detached(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        pid = spawn(path, [*args[:-1], _DETACH + args[-1]], passfds)
        os.waitpid(pid, 0)
        return pid

    setattr(util, "spawnv_passfds", spawn_detached)  # noqa: B010  # for this one call
    try:
        resource_tracker.ensure_running()
    finally:
        setattr(util, "spawnv_passfds", spawn)  # noqa: B010
