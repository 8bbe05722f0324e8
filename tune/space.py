"""From a sweep's file to each trial's training job, checked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ebbtide.platform import config as job_file
from ebbtide.platform.config import dotted
from ebbtide.platform.errors import ConfigError
from ebbtide.platform.storage import join
from ebbtide.train.config import CostConfig, TrainConfig
from ebbtide.tune.config import TuneConfig

Values = Mapping[str, Any]
"""Dotted keys of a training job and a value for each."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, read and checked: ``base`` as in its file, ``trial_base`` as the trials run it.

    Neither is there for a sweep over a function.
    """

    config: TuneConfig
    base: TrainConfig | None = None
    trial_base: TrainConfig | None = None

    @property
    def name(self) -> str:
        if self.config.name is not None:
            return self.config.name
        if self.base is not None:
            return f"{self.base.name}-tune"
        return str(self.config.function).rpartition(":")[2].strip("_") + "-tune"

    @property
    def uri(self) -> str:
        """Where the sweep keeps its results and the best job or values."""
        storage = self.config.storage or (self.base.storage if self.base is not None else ".")
        return join(storage, self.name)

    @property
    def max_steps(self) -> int | None:
        """Steps of a trial that nothing ends early, where they are known."""
        return self.config.steps if self.trial_base is None else self.trial_base.steps

    @property
    def cost(self) -> CostConfig:
        """What prices a node that does not say its type by a label."""
        if self.config.cost is not None:
            return self.config.cost
        return CostConfig() if self.base is None else self.base.cost

    @property
    def fixed(self) -> dict[str, Any]:
        """What is the same for all trials, as JSON."""
        if self.trial_base is not None:
            return self.trial_base.model_dump(mode="json")
        return dict(self.config.overrides)

    def best(self, values: Values) -> str:
        """A trial's ``train.yaml``, or the values with which its function was called."""
        if self.base is not None:
            return job_file.dump(with_values(self.base, values))
        return yaml.safe_dump({**self.fixed, **values}, sort_keys=False)


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
    if sweep.trial_base is None:
        return
    for key, domain in sweep.config.space.items():
        for value in domain.ends:
            _, faults = _faults(sweep.trial_base, {key: value})
            for at, fault in faults.items():
                if at == key or at.startswith(f"{key}."):
                    raise ConfigError(f"space.{key}: {value!r} is not possible: {fault}")


def _check_module(path: str, function: str) -> None:
    """Refuse a function whose module is not there; it is not imported. Raises ConfigError."""
    module = function.partition(":")[0]
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    finally:
        sys.path.remove(here)
    if found is None:
        raise ConfigError(
            f"{path}: function: there is no module {module} in {here} or installed; run the sweep "
            "in the folder that has it"
        )


def _require_own_limits(path: str, config: TuneConfig, base: TrainConfig) -> None:
    """Raise ConfigError if the base has a budget and the sweep has no limit of that kind: the
    base's is of one run, and would be taken for the sweep's."""
    dollars = ("max_dollars_per_run", "max_dollars_per_epoch", "max_dollars_per_hour", "shared")
    for own, given, limits in (
        ("max_dollars", config.max_dollars, dollars),
        ("max_seconds", config.max_seconds, ("deadline",)),
    ):
        named = [limit for limit in limits if getattr(base.budget, limit) is not None]
        if named and given is None:
            raise ConfigError(
                f"{path}: {config.base} has budget.{named[0]}, which holds for one run and not for "
                f"a sweep of many; give the sweep its own {own}"
            )


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep's file and its base, and check them. Raises ConfigError; nothing is started.

    ``overrides`` are ``KEY.PATH=VALUE`` texts for the sweep's file.
    """
    config = job_file.load(path, TuneConfig, overrides)
    if config.function is not None:
        _check_module(str(path), config.function)
        return Sweep(config)
    assert config.base is not None
    base = job_file.load(Path(path).parent / config.base, TrainConfig)
    _require_own_limits(str(path), config, base)
    values: dict[str, Any] = dict(config.overrides)
    if config.steps is not None:
        values["steps"] = config.steps
    try:
        trial_base = with_values(base, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: a trial of {config.base} is not possible: {error}") from error
    sweep = Sweep(config, base, trial_base)
    if (
        config.scheduler != "none"
        and trial_base.validation.every_steps == 0
        and "validation.every_steps" not in config.space
    ):
        raise ConfigError(
            f"{path}: scheduler: {config.scheduler} compares trials while they run, but the job "
            "validates only at its end; set overrides.validation.every_steps"
        )
    try:
        check_space(sweep)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return sweep
