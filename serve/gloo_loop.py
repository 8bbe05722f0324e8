"""Gloo's event loop, one for all process groups of a process that is alone in them.

vLLM makes some seven groups for every engine, also where the engine is one process. Each has gloo
listen on a device of its own, whose thread wakes a hundred times a second for as long as it lives
(``gloo/transport/tcp/loop.cc`` waits for 10 ms at a time, which nothing can change). A device can
serve any number of groups. torch has a public way to give a group its device, but not through
``new_group``; this module replaces the class that it takes for groups. Seen in torch 2.13; a test
fails when a release changes it.
"""

from __future__ import annotations

import functools
import logging
from datetime import timedelta
from typing import Any

log = logging.getLogger(__name__)


def install() -> bool:
    """Have groups of one process that are made from now on share a device; once per process.

    False, with a warning, if torch is not what it was: groups work, but each has its thread.
    """
    try:
        from torch.distributed import ProcessGroupGloo, distributed_c10d

        options = ProcessGroupGloo._Options  # type: ignore[attr-defined]  # torch's own stub lacks
        if not hasattr(options(), "_devices"):
            raise AttributeError("its options name no devices")
    except (ImportError, AttributeError) as error:
        log.warning("gloo's threads cannot be shared, an idle engine will wake more: %s", error)
        return False
    if distributed_c10d.ProcessGroupGloo is ProcessGroupGloo:
        setattr(distributed_c10d, "ProcessGroupGloo", _sharing(ProcessGroupGloo))  # noqa: B010
    return True


def _sharing(kind: Any) -> Any:
    """torch's class of groups, with one device for all that have one member."""

    @functools.cache
    def device() -> Any:
        return kind.create_default_device()

    class SharingGroup(kind):  # type: ignore[misc]  # of a class that is not known here
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            if size > 1:
                super().__init__(store, rank, size, timeout)
                return
            options = kind._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    return SharingGroup
