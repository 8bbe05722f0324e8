"""One checkpoint scored by one task: the trial behind ``ebbtide tune evaluate``."""

from __future__ import annotations

import importlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.platform import export_manifest
from ebbtide.platform.errors import CheckpointError, ConfigError
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import ModelConfig, TrainConfig
from ebbtide.tune.suite import SCORE, Task
from ebbtide.tune.trial import Context, Metrics

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT, TASK = "checkpoint", "task"
NO_BASE = "{uri}: an export does not say what to score it on; give --base"


def score(config: dict[str, Any], context: Context) -> Metrics:
    """The trial: ``step`` of the checkpoint and its ``score``, and how many ``sequences`` a loss is
    of."""
    uri, given = config[CHECKPOINT], config["base"]
    base = None if given is None else TrainConfig.model_validate(given)
    task = Task.model_validate(config["tasks"][config[TASK]])
    model, step, job = _load(uri, base)
    if task.scorer is not None:
        return {"step": step, SCORE: _scored(model, job, task)}
    loss, sequences = _loss(model, step, job, task)
    return {"step": step, SCORE: loss, "sequences": sequences}


def _scored(model: nn.Module, job: TrainConfig, task: Task) -> float:
    """What the user's own function says."""
    import torch

    module, _, name = str(task.scorer).partition(":")
    function = getattr(importlib.import_module(module), name)
    model.eval()
    with torch.no_grad():
        return float(function(model, job, **task.options))


def _loss(model: nn.Module, step: int, job: TrainConfig, task: Task) -> tuple[float, int]:
    """The validation loss, just as a run on one worker computes it, and the sequences it is of."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ebbtide.train.dataset import TokenDataset
    from ebbtide.train.generation import Generation
    from ebbtide.train.loss import build_loss
    from ebbtide.train.shard import shard
    from ebbtide.train.trial import single_process_group
    from ebbtide.train.validate import validation_loss

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = task.sequence_length or job.data.sequence_length
    data = TokenDataset(task.data or job.data.uri, task.split, length)
    sequences = min(task.sequences or job.validation.sequences, data.num_sequences)
    with single_process_group(device):
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        loss = validation_loss(
            shard(model.to(device), mesh, job.precision),
            build_loss(job.model),
            data,
            sequences,
            job.batch.micro_sequences,
            Generation(0, 0, 1, step, None),
            device,
        )
    return loss, sequences


def _load(uri: str, base: TrainConfig | None) -> tuple[nn.Module, int, TrainConfig]:
    """The model, its step, and the job whose data and validation are used."""
    from ebbtide.train.dataset import read_index
    from ebbtide.train.model import build_model
    from ebbtide.train.stored import from_newest

    export = export_manifest.read(open_storage(uri))
    if export is None:
        return from_newest(uri, partial(_load_checkpoint, base))
    if base is None:
        raise ConfigError(NO_BASE.format(uri=uri))
    source = ModelConfig(source=uri, weights="pretrained", loss=base.model.loss)
    vocab_size = read_index(base.data.uri).vocab_size
    return build_model(source, vocab_size, base.seed), export.step, base


def _load_checkpoint(base: TrainConfig | None, uri: str) -> tuple[nn.Module, int, TrainConfig]:
    """The same of a single checkpoint. Raises what reading raises if it is removed meanwhile."""
    from ebbtide.train import checkpoint
    from ebbtide.train.dataset import read_index
    from ebbtide.train.model import build_model

    own = checkpoint.read_train_config(uri)
    job = own if base is None else base
    described, state = checkpoint.read_model_state(uri)
    text = checkpoint.read_model_config(uri)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(text or "")
        source = own.model if text is None else ModelConfig(source=folder, loss=own.model.loss)
        model = build_model(source, read_index(job.data.uri).vocab_size, job.seed)
    lacking, surplus = model.load_state_dict(state, strict=False)
    lacking = set(lacking) - set(getattr(model, "all_tied_weights_keys", ()))
    if lacking or surplus:
        raise CheckpointError(f"{uri}: does not fit its model: {min([*lacking, *surplus])}")
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    return model, described.step, job
