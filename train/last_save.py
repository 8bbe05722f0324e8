"""A save that must not be lost is tried again while the storage refuses it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from ebbtide.platform.errors import AccessError, StorageError, Unreachable
from ebbtide.train.agree import from_first

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


def insist(save: Callable[[], T], for_s: float, group: dist.ProcessGroup) -> T:
    """``save()``; what the storage refuses is tried again, after growing pauses, for ``for_s``.

    Collective, as ``save`` is, which fails on all ranks if on one. A fault that does not pass by
    itself (AccessError: permission, no such bucket) is raised at once.
    """
    gives_up_s = time.monotonic() + for_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return save()
        except StorageError as error:
            if isinstance(error, AccessError) and not isinstance(error, Unreachable):
                raise
            has_time = time.monotonic() + pause_s < gives_up_s
            if not from_first(partial(bool, has_time), group):
                raise
            if dist.get_rank() == 0:
                logger.warning("the last save is tried again in %.0f s: %s", pause_s, error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
