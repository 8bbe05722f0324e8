"""Training from Python: the few names that are kept stable. The command line does no more.

::

    from ebbtide.train import api

    api.prepare(api.PrepareConfig(sources=("books/",), out="data/books"))
    config = api.load("train.yaml", ["optimizer.lr=3e-4"])
    result = api.train(config)  # on Ray: an address, RAY_ADDRESS, or this machine
    api.export(result.run_uri, "export/books")

Whatever goes wrong is an :class:`EbbtideError`, whose message says what, where and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ebbtide.platform import config as job_file
from ebbtide.platform.errors import EbbtideError
from ebbtide.platform.storage import open_storage
from ebbtide.train import manifest
from ebbtide.train.checkpoint import read_model_state, read_train_config
from ebbtide.train.config import TrainConfig
from ebbtide.train.export import export
from ebbtide.train.job import RunResult, train
from ebbtide.train.manifest import CheckpointInfo, CheckpointManifest
from ebbtide.train.prepare import PrepareConfig, PrepareResult, prepare
from ebbtide.train.trial import run_trial

__all__ = [
    "CheckpointInfo",
    "CheckpointManifest",
    "EbbtideError",
    "PrepareConfig",
    "PrepareResult",
    "RunResult",
    "TrainConfig",
    "checkpoints",
    "export",
    "load",
    "prepare",
    "read_model_state",
    "read_train_config",
    "run_trial",
    "train",
]


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a training job file; ``overrides`` are texts such as ``optimizer.lr=3e-4``."""
    return job_file.load(path, TrainConfig, overrides)


def checkpoints(run_uri: str) -> list[CheckpointInfo]:
    """The checkpoints of a run, highest step first, incomplete and corrupt ones included."""
    return manifest.list_checkpoints(open_storage(run_uri))
