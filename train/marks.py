"""Small objects beside a run's checkpoints: whose the run is, and what a person wants kept."""

from __future__ import annotations

import contextlib

from ebbtide.platform.errors import AlreadyExists, CheckpointError, NotFound
from ebbtide.platform.storage import Storage
from ebbtide.train.manifest import FOLDER, PIN, CheckpointInfo, read_manifest

_RUN_ID = "run-id"


def pin(run: Storage, info: CheckpointInfo, *, is_pinned: bool = True) -> None:
    """Keep a complete checkpoint for good, or no longer. Raises CheckpointError if it is gone."""
    checkpoint = run.child(f"{FOLDER}/{info.name}")
    if not is_pinned:
        checkpoint.delete(PIN)
        return
    checkpoint.put(PIN, b"")
    try:  # the run may have deleted it meanwhile
        read_manifest(checkpoint)
    except NotFound as error:
        checkpoint.delete(PIN)
        raise CheckpointError(f"{checkpoint.uri} was deleted meanwhile; pin another") from error


def claim(run: Storage, run_id: str) -> str:
    """What tells a run from others that had its URI before: ``run_id``, if it had none yet.

    Made once, in the run's storage; whoever is first gives it.
    """
    try:
        return run.get(_RUN_ID).decode()
    except NotFound:
        with contextlib.suppress(AlreadyExists):
            run.put(_RUN_ID, run_id.encode(), if_absent=True)
        return run.get(_RUN_ID).decode()
