"""From a sweep's file to each trial's training job, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebbtide.platform import config as job_file
from ebbtide.platform.config import dotted
from ebbtide.platform.errors import ConfigError
from ebbtide.platform.storage import join
from ebbtide.train.config import TrainConfig
from ebbtide.tune.config import TuneConfig

Values = Mapping[str, Any]
"""Dotted keys of a training job and a value for each."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, read and checked: ``base`` as in its file, ``trial_base`` as the trials run it."""

    config: TuneConfig
    base: TrainConfig
    trial_base: TrainConfig

    @property
    def name(self) -> str:
        return self.config.name or f"{self.base.name}-tune"

    @property
    def uri(self) -> str:
        """Where the sweep keeps its results and the best ``train.yaml``."""
        return join(self.config.storage or self.base.storage, self.name)


def _faults(base: TrainConfig, values: Values) -> tuple[TrainConfig | None, dict[str, str]]:
    """The base with some values set; or the faults, by dotted key (a section's own: its key)."""
    data = base.model_dump()
    for key, value in values.items():
        *sections, last = key.split(".")
        target = data
        for section in sections:
            target = target[section]
        target[last] = value
    try:
        return TrainConfig.model_validate(data), {}
    except ValidationError as error:
        return None, {
            dotted(fault["loc"]): fault["msg"].removeprefix("Value error, ")
            for fault in error.errors()
        }


def with_values(base: TrainConfig, values: Values) -> TrainConfig:
    """The training job with some values set. Raises ConfigError naming each fault."""
    job, faults = _faults(base, values)
    if job is None:
        lines = [f"{key}: {fault}" if key else fault for key, fault in faults.items()]
        raise ConfigError("; ".join(lines))
    return job


def check_space(sweep: Sweep) -> None:
    """Refuse a space with values that its key cannot take. Raises ConfigError.

    Values that only a combination makes impossible are left to the trial that meets them.
    """
    for key, domain in sweep.config.space.items():
        for value in domain.ends:
            _, faults = _faults(sweep.trial_base, {key: value})
            for at, fault in faults.items():
                if at == key or at.startswith(f"{key}."):
                    raise ConfigError(f"space.{key}: {value!r} is not possible: {fault}")


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep's file and its base, and check them. Raises ConfigError; nothing is started.

    ``overrides`` are ``KEY.PATH=VALUE`` texts for the sweep's file.
    """
    config = job_file.load(path, TuneConfig, overrides)
    base = job_file.load(Path(path).parent / config.base, TrainConfig)
    values: dict[str, Any] = dict(config.overrides)
    if config.steps is not None:
        values["steps"] = config.steps
    try:
        trial_base = with_values(base, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: a trial of {config.base} is not possible: {error}") from error
    sweep = Sweep(config, base, trial_base)
    if (
        config.scheduler == "asha"
        and trial_base.validation.every_steps == 0
        and "validation.every_steps" not in config.space
    ):
        raise ConfigError(
            f"{path}: scheduler: asha compares trials while they run, but the job validates only "
            "at its end; set overrides.validation.every_steps"
        )
    try:
        check_space(sweep)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return sweep
