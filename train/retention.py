"""Which checkpoints of a run are kept: a pure decision, and the order in which the rest goes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ebbtide.platform.errors import StorageError
from ebbtide.platform.storage import Storage
from ebbtide.train.manifest import FOLDER, MANIFEST, CheckpointInfo, list_checkpoints

logger = logging.getLogger(__name__)


def surplus(
    found: Sequence[CheckpointInfo], committed: CheckpointInfo, keep_last: int
) -> list[CheckpointInfo]:
    """What may go, now that ``committed`` is.

    Kept are it and the complete ones before it, ``keep_last`` in all. Whatever lies at a higher
    step is of another course of the run: it counts for nothing here and is left alone. An
    incomplete or damaged one goes once a complete one of a higher step exists.
    """
    others = [i for i in found if i.step <= committed.step and i.name != committed.name]
    complete = sorted((i for i in others if i.state == "complete"), key=lambda i: -i.step)
    broken = [i for i in others if i.state != "complete" and i.step < committed.step]
    return complete[keep_last - 1 :] + broken


def collect(run: Storage, committed: CheckpointInfo, keep_last: int) -> list[CheckpointInfo]:
    """Delete what is surplus under a run's root, and say what it was.

    What cannot be deleted is left for the next time, with a warning: it is no reason to stop.
    """
    gone = []
    try:
        for info in surplus(list_checkpoints(run), committed, keep_last):
            _delete(run, info)
            gone.append(info)
            logger.info("removed checkpoint %s", info.name)
    except StorageError as error:
        logger.warning("an old checkpoint could not be removed: %s", error)
    return gone


def _delete(run: Storage, info: CheckpointInfo) -> None:
    """The manifest first: no reader ever sees it without its files."""
    prefix = f"{FOLDER}/{info.name}"
    run.delete(f"{prefix}/{MANIFEST}")
    for file in run.list(f"{prefix}/"):
        run.delete(file.key)
