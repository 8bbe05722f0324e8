"""Which checkpoints of a run are kept: a pure decision, and the order in which the rest goes.

Promises: a complete checkpoint goes only after a newer one is committed, its manifest first, so
that at every instant there is one that can be loaded; the best and the pinned ones stay; what a
killed attempt has left unfinished goes after a grace time, which is measured by the storage's own
clock; nothing outside of the run's own checkpoints is looked at.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from ebbtide.platform.errors import StorageError
from ebbtide.platform.storage import Storage
from ebbtide.train.config import CheckpointConfig
from ebbtide.train.manifest import FOLDER, MANIFEST, CheckpointInfo, list_checkpoints, name_of_key

logger = logging.getLogger(__name__)


def best(found: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete checkpoint of the lowest validation loss, of equal ones the newest; or None."""
    complete = [info for info in found if info.state == "complete"]
    measured = [
        (info.validation_loss, -info.step, info.name, info)
        for info in complete
        if info.validation_loss is not None and math.isfinite(info.validation_loss)
    ]
    return min(measured)[-1] if measured else None


def surplus(
    found: Sequence[CheckpointInfo], committed: CheckpointInfo, keep: CheckpointConfig
) -> list[CheckpointInfo]:
    """What may go, now that ``committed`` is.

    Kept are it and the complete ones before it (by step, then by name, so that no two that are
    committed at once remove each other), ``keep_last`` in all; beside them the best of all these
    and those that a person has pinned. Complete ones of a higher step are of another course of the
    run: they count for nothing here and are left alone. A damaged one goes once a complete
    one of a higher step exists. An incomplete one goes at once if this attempt has left it, and
    else when nothing was added to it for the grace time.
    """
    others = [info for info in found if info.name != committed.name]
    past = [i for i in others if (i.step, i.name) < (committed.step, committed.name)]
    complete = sorted((i for i in past if i.state == "complete"), key=lambda i: -i.step)
    champion = best([*past, committed]) if keep.keep_best else None
    old = [i for i in complete[keep.keep_last - 1 :] if i != champion and not i.is_pinned]
    is_left = _left_behind(found, committed, keep.grace_s)
    broken = [
        i for i in past if i.state == "corrupt" and i.step < committed.step and not i.is_pinned
    ]
    unfinished = [i for i in others if i.state == "incomplete" and is_left(i.name, i.written_s)]
    return old + broken + unfinished


def _left_behind(
    found: Sequence[CheckpointInfo], committed: CheckpointInfo, grace_s: float
) -> Callable[[str, float], bool]:
    """Whether nobody works any more at what is unfinished under a checkpoint's name.

    The attempt of ``committed`` has nothing else at work, as it saves one after the other. What was
    last written to at a time (of the storage's clock) is left behind if that is long ago.
    """
    now_s = max((info.written_s for info in found), default=committed.written_s)
    own = _token(committed.name)

    def is_left(name: str, written_s: float) -> bool:
        if name == committed.name:
            return False
        return _token(name) == own or now_s - written_s >= grace_s

    return is_left


def _token(name: str) -> str:
    return name.rpartition("-")[2]


def collect(
    run: Storage, committed: CheckpointInfo, keep: CheckpointConfig
) -> list[CheckpointInfo]:
    """Delete what is surplus under a run's root, and say what it was.

    What cannot be deleted is left for the next time, with a warning: it is no reason to stop.
    """
    gone = []
    try:
        found = list_checkpoints(run)
        for info in surplus(found, committed, keep):
            _delete(run, info)
            gone.append(info)
            logger.info("removed checkpoint %s", info.name)
        _abort(run, _left_behind(found, committed, keep.grace_s))
    except StorageError as error:
        logger.warning("an old checkpoint could not be removed: %s", error)
    return gone


def _delete(run: Storage, info: CheckpointInfo) -> None:
    """The manifest first: no reader ever sees it without its files."""
    prefix = f"{FOLDER}/{info.name}"
    run.delete(f"{prefix}/{MANIFEST}")
    for file in run.list(f"{prefix}/"):
        run.delete(file.key)


def _abort(run: Storage, is_left: Callable[[str, float], bool]) -> None:
    """Free the bytes of uploads that nobody will finish; no listing of objects shows them."""
    for upload in run.uploads(f"{FOLDER}/"):
        name = name_of_key(upload.key)
        if name is not None and is_left(name, upload.begun_s):
            run.abort(upload)
            logger.info("aborted an unfinished upload of checkpoint %s", name)
