"""A run taken up by the URI of a checkpoint alone, on whatever cluster: its job is stored with it.

Promises: the run goes on where its storage is now, under the name that it has there, with its
ledger, events and attempts; the newest complete checkpoint is gone on from, which leads to the same
run as any earlier one; nothing else has to be copied but the data that the job names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from ebbtide.platform import config as job_file
from ebbtide.platform.errors import CheckpointError, ConfigError, NotFound
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import FOLDER, MODEL_CONFIG, newest, read_manifest, read_train_config

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(rf"/{FOLDER}/step-\d+-[0-9a-f]+$")


def run_of(uri: str) -> str:
    """The URI of the run that a checkpoint's URI belongs to; that of a run is its own."""
    return _CHECKPOINT.sub("", uri.rstrip("/"))


def paused_job(uri: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The job of the run at ``uri`` (of a checkpoint of it, or of the run), where it is now.

    ``overrides`` are ``KEY.PATH=VALUE`` texts. Raises CheckpointError if there is no complete
    checkpoint, and ConfigError if an override is wrong or would have the run go on elsewhere.
    """
    uri = open_storage(uri).uri  # of a path as it was written, the whole
    run_uri = run_of(uri)
    storage_uri, _, name = run_uri.rpartition("/")
    run = open_storage(run_uri)
    if run_uri != uri:
        _require_there(uri)
    found = newest(run)
    if found is None:
        raise CheckpointError(
            f"{run_uri}: no complete checkpoint is here to go on from; give the URI of one, or "
            "start the job from its file"
        )
    if uri not in (run_uri, found.uri):
        logger.info("%s has a newer checkpoint, of step %d; going on from it", name, found.step)
    checkpoint = open_storage(found.uri)
    config = read_train_config(checkpoint, read_manifest(checkpoint))
    config = config.model_copy(update={"storage": storage_uri, "name": name})
    config = job_file.parse(
        job_file.dump(config), TrainConfig, f"the job of {found.uri}", overrides
    )
    if (config.storage, config.name) != (storage_uri, name):
        raise ConfigError(
            f"{run_uri}: a run that is resumed goes on in its place; leave storage and name out of "
            "--set, or copy the run's folder to where it is to go on"
        )
    return _with_model(config, run, checkpoint)


def _require_there(uri: str) -> None:
    try:
        read_manifest(open_storage(uri))
    except NotFound as error:
        raise CheckpointError(
            f"{uri}: there is no complete checkpoint at this place; ebbtide checkpoints "
            f"{run_of(uri)} shows what there is"
        ) from error


def _with_model(config: TrainConfig, run: Storage, checkpoint: Storage) -> TrainConfig:
    """The job with the model's own description from the run, where ``model.source`` is not here.

    Weights come from the checkpoint in any case.
    """
    from ebbtide.train.model import has_source  # late: it imports torch

    source = config.model.source
    if source is None or has_source(source):
        return config
    try:
        description = checkpoint.get(MODEL_CONFIG)
    except NotFound:
        return config  # it is then said what is missing
    kept = run.child("model")
    kept.put(MODEL_CONFIG, description)
    logger.info("%s is not here; the model is built from the run's own description", source)
    model = config.model.model_copy(
        update={"source": f"{kept.uri}/{MODEL_CONFIG}", "weights": "random"}
    )
    return config.model_copy(update={"model": model})
