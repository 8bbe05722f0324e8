"""The training state in storage: saved by DCP, committed by the manifest, verified on load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.platform.storage import open_storage
from ebbtide.train import manifest as manifests
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import (
    CheckpointInfo,
    CheckpointManifest,
    list_checkpoints,
    newest,
    verify,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointInfo",
    "CheckpointManifest",
    "list_checkpoints",
    "newest",
    "read_model_state",
    "read_train_config",
    "verify",
]


def read_train_config(checkpoint_uri: str) -> TrainConfig:
    """The job file of a checkpoint; a run's URI means its newest checkpoint."""
    return manifests.read_train_config(open_storage(checkpoint_uri))


def read_model_state(checkpoint_uri: str) -> tuple[CheckpointManifest, dict[str, torch.Tensor]]:
    """The whole model on the CPU in fp32, by parameter name, without a process group."""
    raise NotImplementedError
