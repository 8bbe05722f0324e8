"""Scoring checkpoints and exports by their validation loss, each in a trial of the pool.

Promises: a checkpoint's score is the validation loss that its run logged at that step, or would
have; one that cannot be scored fails alone, with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.platform import export_manifest
from ebbtide.platform.errors import CheckpointError, ConfigError, TuneError
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import ModelConfig, TrainConfig
from ebbtide.tune.config import PoolConfig, TuneConfig
from ebbtide.tune.results import SweepResult
from ebbtide.tune.space import Sweep
from ebbtide.tune.trial import Context, Metrics

if TYPE_CHECKING:
    from torch import nn

METRIC = "validation_loss"
KEY = "checkpoint"


def evaluate(
    uris: Sequence[str],
    base: TrainConfig | None = None,
    *,
    pool: PoolConfig | None = None,
    address: str | None = None,
) -> SweepResult:
    """Score every one of ``uris``; a run's URI means its newest checkpoint.

    They are scored on the data and the ``validation`` section of ``base``, without it on those of
    their own run. Raises ConfigError if one is given twice, TuneError if none can be scored.
    """
    from ebbtide.tune.job import run_sweep

    twice = sorted({uri for uri in uris if list(uris).count(uri) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is given twice")
    with tempfile.TemporaryDirectory(prefix="ebbtide-evaluate-") as folder:
        config = TuneConfig(
            function=f"{__name__}:score",
            storage=folder,
            overrides={"base": None if base is None else base.model_dump(mode="json")},
            space={KEY: {"choice": list(uris)}},  # type: ignore[dict-item]  # as in a file
            searcher="grid",
            metric=METRIC,
            pool=pool or PoolConfig(),
        )
        try:
            return run_sweep(Sweep(config), address=address)
        except TuneError as error:  # its details go with the folder
            raise TuneError(str(error).partition("; details:")[0]) from error


def score(config: dict[str, Any], context: Context) -> Metrics:
    """The trial: ``step``, ``validation_loss`` and the number of ``tokens`` it is a mean over."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ebbtide.train.dataset import TokenDataset
    from ebbtide.train.generation import Generation
    from ebbtide.train.loss import build_loss
    from ebbtide.train.shard import shard
    from ebbtide.train.trial import single_process_group
    from ebbtide.train.validate import validation_loss

    uri, given = config[KEY], config["base"]
    base = None if given is None else TrainConfig.model_validate(given)
    model, step, job = _load(uri, base)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TokenDataset(job.data.uri, "validation", job.data.sequence_length)
    with single_process_group(device):
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        loss = validation_loss(
            shard(model.to(device), mesh, job.precision),
            build_loss(job.model),
            data,
            job.validation.sequences,
            job.batch.micro_sequences,
            Generation(0, 0, 1, step, None),
            device,
        )
    sequences = min(job.validation.sequences, data.num_sequences)
    return {"step": step, METRIC: loss, "sequences": sequences}


def _load(uri: str, base: TrainConfig | None) -> tuple[nn.Module, int, TrainConfig]:
    """The model, its step (0 if unknown), and the job whose data and validation are used."""
    from ebbtide.train import checkpoint
    from ebbtide.train.dataset import read_index
    from ebbtide.train.model import build_model

    export = export_manifest.read(open_storage(uri))
    if export is not None:
        if base is None:
            raise ConfigError(f"{uri}: an export does not say what to score it on; give --base")
        source = ModelConfig(source=uri, weights="pretrained", loss=base.model.loss)
        vocab_size = read_index(base.data.uri).vocab_size
        return build_model(source, vocab_size, base.seed), export.step, base
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
