"""The configuration of a sweep: what ``ebbtide tune FILE`` reads."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from ebbtide.platform.config import Config
from ebbtide.train.config import NonNegative, Positive, TrainConfig, Uri

Kind = Literal["uniform", "quniform", "loguniform", "int", "logint", "choice"]
KINDS: tuple[str, ...] = get_args(Kind)
Seconds = Annotated[float, Field(gt=0)]


def train_keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """The dotted key of every value that a training job knows, such as ``optimizer.lr``."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from train_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _known(key: str) -> str:
    keys = list(train_keys())
    if key not in keys:
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "write a dotted key, as in optimizer.lr"
        raise ValueError(f"not a key of a training job; {hint}")
    if key in ("name", "storage"):
        raise ValueError("is set by the sweep; remove it")
    return key


TrainKey = Annotated[str, AfterValidator(_known)]


class Domain(Config):
    """The values that one key may take, written as one of

    ``{uniform: [low, high]}``, ``{quniform: [low, high, step]}``, ``{loguniform: [low, high]}``,
    ``{int: [low, high]}`` and ``{logint: [low, high]}`` (both ends included),
    ``{choice: [value, ...]}``.
    """

    kind: Kind
    values: tuple[Any, ...]

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, found: Any) -> Any:
        if not isinstance(found, Mapping) or len(found) != 1:
            raise ValueError("write one range, as in {loguniform: [1e-4, 1e-2]}")
        ((kind, values),) = found.items()
        if kind not in KINDS:
            close = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)}"
            raise ValueError(f"{kind} is not a kind of range; {hint}")
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"{kind} takes a list of values")
        return {"kind": kind, "values": tuple(values)}

    @model_validator(mode="after")
    def _possible(self) -> Domain:
        if self.kind == "choice":
            return self
        wanted = 3 if self.kind == "quniform" else 2
        numeric = int if self.kind in ("int", "logint") else int | float
        if len(self.values) != wanted or not all(
            isinstance(value, numeric) and not isinstance(value, bool) and math.isfinite(value)
            for value in self.values
        ):
            kind = "whole numbers" if numeric is int else "finite numbers"
            raise ValueError(f"{self.kind} takes {wanted} {kind}")
        low, high = self.values[:2]
        if not low < high:
            raise ValueError(f"{self.kind}: the first value must be below the second")
        if self.kind in ("loguniform", "logint") and low <= 0:
            raise ValueError(f"{self.kind}: both values must be above 0")
        if self.kind == "quniform" and not self.values[2] > 0:
            raise ValueError("quniform: the step must be above 0")
        return self

    @model_serializer
    def _to_yaml(self) -> dict[str, list[Any]]:
        return {self.kind: list(self.values)}

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all: the two ends of a range, or every choice."""
        return self.values if self.kind == "choice" else self.values[:2]


class AshaConfig(Config):
    """Asynchronous successive halving (https://arxiv.org/abs/1810.05934).

    No trial is stopped before ``grace_steps`` steps (default: a ninth of the trial's steps); at
    each rung the best 1/``reduction_factor`` go on.
    """

    grace_steps: Positive | None = None
    reduction_factor: Annotated[int, Field(ge=2)] = 3


class PoolConfig(Config):
    """The evaluators that trials run on: ``size`` processes that stay warm between sweeps.

    A sweep reserves ``cpus`` for each of them while it runs; an idle pool reserves nothing.
    """

    size: Positive = 2
    cpus: Annotated[float, Field(gt=0)] = 1
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "ebbtide-pool"
    start_timeout_s: Seconds = 600


class TuneConfig(Config):
    """One sweep over a training job.

    ``base`` is the training job's file, relative to the sweep's own. ``overrides`` and ``steps``
    change it for the trials only: the best ``train.yaml`` is the base with the chosen values.
    """

    base: Uri
    overrides: dict[TrainKey, Any] = {}
    steps: Positive | None = None
    space: Annotated[dict[TrainKey, Domain], Field(min_length=1)]
    searcher: Literal["random", "grid", "optuna"] = "random"
    num_samples: Positive | None = None
    seed: NonNegative = 0
    metric: Annotated[str, Field(min_length=1)] = "validation_loss"
    mode: Literal["min", "max"] = "min"
    scheduler: Literal["none", "asha"] = "none"
    asha: AshaConfig = AshaConfig()
    concurrency: Positive | None = None
    trial_timeout_s: Seconds = 3600
    max_tries: Positive = 2
    pool: PoolConfig = PoolConfig()
    storage: Uri | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None

    @field_validator("space", "overrides", mode="before")
    @classmethod
    def _flat(cls, found: Any) -> Any:
        """``optimizer: {lr: ...}`` may be written for ``optimizer.lr: ...``; the later holds."""
        if not isinstance(found, Mapping):
            return found
        sections = {key.rpartition(".")[0] for key in train_keys()} - {""}
        flat: dict[str, Any] = {}
        for key, value in found.items():
            if key in sections and isinstance(value, Mapping):
                flat.update({f"{key}.{inner}": item for inner, item in value.items()})
            else:
                flat[key] = value
        return flat

    @model_validator(mode="after")
    def _agrees(self) -> TuneConfig:
        twice = sorted(set(self.space) & {*self.overrides, *(["steps"] if self.steps else [])})
        if twice:
            raise ValueError(f"{twice[0]} is both searched and set; keep one")
        if self.steps is not None and "steps" in self.overrides:
            raise ValueError("steps is set twice: by steps and in overrides; keep one")
        if self.searcher == "grid":
            wrong = [key for key, domain in self.space.items() if domain.kind != "choice"]
            if wrong:
                raise ValueError(f"searcher: grid needs a choice for space.{wrong[0]}")
            if self.num_samples is not None:
                raise ValueError("searcher: grid tries every combination; remove num_samples")
        elif self.num_samples is None:
            raise ValueError(f"searcher: {self.searcher} needs num_samples")
        if self.concurrency is not None and self.concurrency > self.pool.size:
            raise ValueError(
                f"concurrency is {self.concurrency}, but pool.size is {self.pool.size}"
            )
        return self

    @property
    def num_trials(self) -> int:
        """How many configurations are tried."""
        if self.searcher != "grid":
            return self.num_samples or 0
        count = 1
        for domain in self.space.values():
            count *= len(domain.values)
        return count
