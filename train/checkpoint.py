"""The training state in storage: saved, committed by the manifest, and restored by any world size.

The state is one flat mapping: ``model.<name>`` for parameters and persistent buffers (tied ones
once, under their first name), ``optimizer.<name>.<slot>`` for the optimizer. Promises: a save that
returns is committed, one that fails on any rank fails on all and is not; a restore has checked
every byte it used. What is read by URI is in :mod:`ebbtide.train.stored`.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbtide.platform import config as job_file
from ebbtide.platform.checksums import sha256
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import CheckpointError, NotFound, StorageError, TrainingError
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import Storage
from ebbtide.train import dcp, manifest, resume
from ebbtide.train.agree import everywhere, from_first, total
from ebbtide.train.config import TrainConfig, WorkersConfig
from ebbtide.train.manifest import (
    CheckpointInfo,
    CheckpointManifest,
    list_checkpoints,
    newest,
    verify,
)
from ebbtide.train.marks import claim
from ebbtide.train.shard import local
from ebbtide.train.stored import MODEL, read_model_config, read_model_state, read_train_config

__all__ = [
    "CheckpointInfo",
    "CheckpointManifest",
    "Checkpoints",
    "list_checkpoints",
    "newest",
    "read_model_config",
    "read_model_state",
    "read_train_config",
    "training_state",
    "verify",
]

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer."


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the training state by name, sharded as it is; restoring writes into them."""
    state: dict[str, Tensor] = {}
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            state[f"{MODEL}{name}"] = buffer
    for name, parameter in model.named_parameters():
        state[f"{MODEL}{name}"] = parameter.detach()
        for slot, value in optimizer.state.get(parameter, {}).items():
            state[f"{_OPTIMIZER}{name}.{slot}"] = value
    return state


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, as one attempt of it sees them. Both methods are collective.

    ``token`` keeps what this attempt writes apart from the remains of others; ``run_id`` tells this
    run from one that was deleted under the same URI. ``events`` gives, on rank 0, what is to be
    stored of the run's history beside the state after a step.
    """

    run: Storage
    config: TrainConfig
    dataset_sha256: str
    token: str
    fingerprint: Mapping[str, str]
    model_config: str | None = None
    run_id: str = ""
    events: Callable[[int], bytes] | None = None

    @property
    def job(self) -> str:
        """A digest of what is computed, on what: copies in memory are of no use to another job."""
        text = job_file.dump(self.config.model_copy(update={"workers": WorkersConfig()}))
        return sha256(f"{text}\n{self.dataset_sha256}\n{self.run_id}".encode())

    def save(
        self,
        state: Mapping[str, Tensor],
        step: int,
        tokens_seen: int,
        loss: float | None,
        validation_loss: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> CheckpointInfo:
        """Store and commit the state after ``step`` steps, in the calling thread.

        ``group``: a process group of all ranks other than the default one, for a thread of its own.
        Raises TrainingError naming a tensor that is not finite, StorageError, CheckpointError.
        """
        _require_finite(state, step, group)
        key = manifest.checkpoint_key(step, self.token)
        checkpoint = self.run.child(key)
        with contextlib.ExitStack() as stack:
            folder = everywhere(lambda: stack.enter_context(_staging_folder()), group)
            dcp.write(state, folder, group)
            everywhere(lambda: self._upload(folder, checkpoint, step), group)
        description = CheckpointManifest(
            run=self.config.name,
            step=step,
            time_s=SystemClock().time(),
            world_size=dist.get_world_size(),
            config_sha256=sha256(job_file.dump(self.config).encode()),
            dataset_sha256=self.dataset_sha256,
            tokens_seen=tokens_seen,
            loss=loss,
            validation_loss=validation_loss,
            fingerprint=dict(self.fingerprint),
            files=(),
        )
        whole = from_first(lambda: self._commit(checkpoint, description), group)
        uri = f"{self.run.uri}/{key}"
        return CheckpointInfo(
            step, uri, "complete", whole.size_bytes, whole.time_s, validation_loss
        )

    def _commit(self, checkpoint: Storage, description: CheckpointManifest) -> CheckpointManifest:
        """On rank 0 alone. Where the run's folder was emptied, it becomes this run's again."""
        if self.run_id:
            claim(self.run, self.run_id)
        return manifest.commit(checkpoint, description)

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; -1 if there is none."""
        found = from_first(lambda: newest(self.run))
        return -1 if found is None else found.step

    def restore(self, state: Mapping[str, Tensor]) -> tuple[str, CheckpointManifest] | None:
        """Load the newest complete checkpoint into ``state``: its URI and manifest, or None.

        One whose bytes are wrong is left for the next older one, with a warning. Raises
        CheckpointError if all are wrong, or if the newest is of other samples or another model.
        """
        found = from_first(self._usable)
        for info in found:
            checkpoint = self.run.child(f"{manifest.FOLDER}/{info.name}")
            try:
                description = from_first(partial(self._admit, checkpoint))
                dcp.read(checkpoint, description, state)
            except dcp.DamagedError as error:
                if dist.get_rank() == 0:
                    logger.warning("checkpoint %s cannot be used: %s", info.name, error)
                continue
            return info.uri, description
        if found:
            raise CheckpointError(
                f"{self.run.uri}: none of its {len(found)} checkpoints can be read whole (see the "
                "warnings); restore the files, or give the job another name to start afresh"
            )
        return None

    def _usable(self) -> list[CheckpointInfo]:
        """The complete checkpoints, newest first; tells of committed ones that have suffered."""
        listed = list_checkpoints(self.run)
        for info in listed:
            if info.state == "corrupt" or (info.state == "incomplete" and info.is_committed):
                logger.warning("checkpoint %s cannot be used: %s", info.name, info.problem)
        return [info for info in listed if info.state == "complete"]

    def _upload(self, folder: Path, checkpoint: Storage, step: int) -> None:
        with _mapped(folder):
            if dist.get_rank() == 0:
                (folder / manifest.TRAIN_CONFIG).write_text(job_file.dump(self.config))
                if self.model_config is not None:
                    (folder / manifest.MODEL_CONFIG).write_text(self.model_config)
                if self.events is not None and (told := self.events(step)):
                    (folder / manifest.EVENTS).write_bytes(told)
            paths = sorted(folder.iterdir())
            files = [manifest.describe_file(path.name, path) for path in paths]
        for path in paths:
            checkpoint.put_file(path.name, path)
        manifest.put_part(checkpoint, dist.get_rank(), files)

    def _admit(self, checkpoint: Storage) -> CheckpointManifest:
        """The manifest of a checkpoint from which this job may go on; on rank 0 alone."""
        try:
            description = manifest.read_manifest(checkpoint)
            saved = manifest.read_train_config(checkpoint, description)
        except (NotFound, CheckpointError) as error:
            raise dcp.DamagedError(str(error)) from error
        resume.require_same_run(
            checkpoint.uri, saved, description.dataset_sha256, self.config, self.dataset_sha256
        )
        for warning in resume.warnings(saved, self.config):
            logger.warning("%s", warning)
        for change in resume.changed_fingerprint(description.fingerprint, self.fingerprint):
            logger.warning("%s: results will not be bitwise those of the same run", change)
        return description


@contextlib.contextmanager
def _staging_folder() -> Iterator[Path]:
    """A temporary folder for the files of one save. Raises StorageError if there is no room."""
    with contextlib.ExitStack() as stack:
        with _mapped(Path(tempfile.gettempdir())):
            folder = stack.enter_context(scratch_folder("save"))
        yield folder


@contextlib.contextmanager
def _mapped(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error}; free space there, or set TMPDIR"
        ) from error


def _require_finite(
    state: Mapping[str, Tensor], step: int, group: dist.ProcessGroup | None
) -> None:
    bad = [name for name, tensor in state.items() if not bool(local(tensor).isfinite().all())]
    device = next(iter(state.values())).device
    if int(total(torch.tensor(len(bad), device=device), group)):
        where = f": {bad[0]}" if bad else " on another rank"
        raise TrainingError(
            f"step {step}: the training state has values that are not finite{where}; it is not "
            "saved. Lower optimizer.lr or lengthen schedule.warmup_steps"
        )
