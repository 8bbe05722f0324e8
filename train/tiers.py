"""Where a generation's state comes from and goes to: the nodes' memory, and the run's storage.

Everything here is collective.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ebbtide.platform.storage import open_storage
from ebbtide.train import peers, resume
from ebbtide.train.agree import from_first
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import index_digest
from ebbtide.train.manifest import CheckpointManifest
from ebbtide.train.marks import claim
from ebbtide.train.peers import Moment, PeerMemory
from ebbtide.train.rhythm import Interruptions
from ebbtide.train.saver import Saver

logger = logging.getLogger(__name__)


def open_checkpoints(
    config: TrainConfig,
    device: torch.device,
    model_config: str | None,
    events: Callable[[int], bytes],
) -> Checkpoints:
    """The run's checkpoints, as this attempt sees them; see there for ``events``."""
    run = open_storage(config.run_uri)
    dataset_sha256, token, run_id = from_first(
        lambda: (
            index_digest(config.data.uri),
            uuid.uuid4().hex[:8],
            claim(run, uuid.uuid4().hex),
        )
    )
    return Checkpoints(
        run=run,
        config=config,
        dataset_sha256=dataset_sha256,
        token=token,
        fingerprint=resume.fingerprint(config, device),
        model_config=model_config,
        run_id=run_id,
        events=events,
    )


def restore(
    checkpoints: Checkpoints, state: Mapping[str, Tensor], nodes: Sequence[str]
) -> tuple[str | None, Moment | CheckpointManifest | None]:
    """Fill the state from the nodes' memory or, if that is as new, from storage; and whence."""
    if nodes:
        newest = checkpoints.newest_step()
        moment = peers.restore(checkpoints.run.uri, nodes, state, checkpoints.job, newest)
        if moment is not None:
            logger.info("restored step %d from the nodes' memory", moment.step)
            return "memory", moment
    return checkpoints.restore(state) or (None, None)


def open_saver(
    checkpoints: Checkpoints,
    state: Mapping[str, Tensor],
    nodes: Sequence[str],
    source: str | None,
    interruptions: Interruptions,
) -> Saver:
    """What saves this generation's state, into the memory of ``nodes`` too if there are any.

    ``source`` is where :func:`restore` had it from.
    """
    memory = None
    if nodes:
        token, job = checkpoints.token, checkpoints.job
        memory = PeerMemory(checkpoints.run.uri, nodes, state, token, job)
    return Saver(checkpoints, state, memory, interruptions, is_owed=source == "memory")
