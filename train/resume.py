"""Whether a job may go on from a checkpoint, and what it then has to know: pure comparisons.

The order of samples is fixed by the data, the seed and the global batch: a run in which one of them
changes is another run and is refused. Every other change is allowed and named in a warning.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ebbtide.platform.errors import CheckpointError
from ebbtide.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

_FIXED = ("seed", "data.sequence_length", "batch.global_sequences")
_INSTRUCTION_SETS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Variables that make libraries compute otherwise."""
_FREE = (
    "name",
    "storage",
    "workers",
    "cost",
    "budget",
    "market",
    "checkpoint",
    "data.uri",
    "digest",
)  # no part of the result


def require_same_run(
    where: str, saved: TrainConfig, saved_data: str, now: TrainConfig, data: str
) -> None:
    """Raise CheckpointError if the job's samples are not those of the checkpoint at ``where``.

    ``saved_data`` and ``data`` are digests of the dataset's index.
    """
    differing = [
        f"{key} is {after}, was {before}"
        for key, before, after in differences(saved, now)
        if key in _FIXED
    ]
    if saved_data != data:
        differing.append(f"the dataset at {now.data.uri} is another one than at {saved.data.uri}")
    if differing:
        raise CheckpointError(
            f"{where} is of a run over other samples: {'; '.join(differing)}. "
            "Give the job another name, or set these back"
        )


def warnings(saved: TrainConfig, now: TrainConfig) -> list[str]:
    """What else has changed in the job and changes its result, one text each."""
    return [
        f"{key} is {after}, was {before} when the checkpoint was made"
        for key, before, after in differences(saved, now)
        if key not in _FIXED and not any(f"{key}.".startswith(f"{free}.") for free in _FREE)
    ]


def differences(saved: TrainConfig, now: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Dotted key, value before, value now, of every setting that differs."""
    before, after = _flat(saved.model_dump()), _flat(now.model_dump())
    keys = sorted(before.keys() | after.keys())
    return [(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def fingerprint(config: TrainConfig, device: torch.device) -> dict[str, str]:
    """What the bits of a step depend on beside the training state."""
    import torch  # late: a finished run is looked at without them
    import transformers

    software = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        software |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    else:
        hardware = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        **software,
        "hardware": hardware,
        "threads": str(config.workers.threads),
        "precision": config.precision,
        "reduction": config.reduction,
        **{name: os.environ[name] for name in _INSTRUCTION_SETS if name in os.environ},
    }


def changed_fingerprint(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed in the fingerprint, one text each."""
    return [
        f"{key} is {now.get(key)}, was {saved.get(key)}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]
