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
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ebbtide.platform.budget import Usd
from ebbtide.platform.config import Config
from ebbtide.train.config import CostConfig, NonNegative, Positive, TrainConfig, Uri

Kind = Literal["uniform", "quniform", "loguniform", "int", "logint", "choice"]
KINDS: tuple[str, ...] = get_args(Kind)
_SHAPING = ("model.", "data.", "steps", "seed", "precision")
Seconds = Annotated[float, Field(gt=0)]
Dollars = Annotated[Usd, Field(gt=0)]


def train_keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """The dotted key of every value that a training job knows, such as ``optimizer.lr``."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from train_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _known(key: str, info: ValidationInfo) -> str:
    if (info.data or {}).get("function"):
        return key
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
    ``{choice: [value, ...]}``. With ``when: {key: value}`` (or a list of values) beside it the key
    is only searched where another key of the space, written before it, has (one of) these.
    """

    kind: Kind
    values: tuple[Any, ...]
    when: dict[str, tuple[Any, ...]] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, found: Any) -> Any:
        ranges = {key: found[key] for key in found if key != "when"} if _is_map(found) else {}
        if len(ranges) != 1:
            raise ValueError("write one range, as in {loguniform: [1e-4, 1e-2]}")
        ((kind, values),) = ranges.items()
        if kind not in KINDS:
            close = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)}"
            raise ValueError(f"{kind} is not a kind of range; {hint}")
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"{kind} takes a list of values")
        when = found.get("when", {})
        if not _is_map(when):
            raise ValueError("when takes a key and its value, as in when: {warmup: true}")
        wanted = {key: value if isinstance(value, list) else [value] for key, value in when.items()}
        return {"kind": kind, "values": tuple(values), "when": wanted}

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
    def _to_yaml(self) -> dict[str, Any]:
        when = {"when": {key: list(values) for key, values in self.when.items()}}
        return {self.kind: list(self.values), **(when if self.when else {})}

    def is_active(self, values: Mapping[str, Any]) -> bool:
        """Whether the key is searched beside these values of the others."""
        return all(key in values and values[key] in wanted for key, wanted in self.when.items())

    def nearest(self, value: Any) -> Any:
        """The value of the domain that is nearest to another; a choice's is one already."""
        if self.kind == "choice":
            return value
        low, high = self.values[:2]
        if self.kind in ("int", "logint"):
            value = round(value)
        elif self.kind == "quniform":
            value = round(value / self.values[2]) * self.values[2]
        return min(max(value, low), high)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all: the two ends of a range, or every choice."""
        return self.values if self.kind == "choice" else self.values[:2]


def _is_map(found: Any) -> bool:
    return isinstance(found, Mapping)


class AshaConfig(Config):
    """Asynchronous successive halving (https://arxiv.org/abs/1810.05934).

    No trial is stopped before ``grace_steps`` steps (default: a ninth of the trial's steps); at
    each rung the best 1/``reduction_factor`` go on.
    """

    grace_steps: Positive | None = None
    reduction_factor: Annotated[int, Field(ge=2)] = 3


class MedianConfig(Config):
    """Stops a trial whose best is worse than the median of the others' averages at its step
    (https://dl.acm.org/doi/10.1145/3097983.3098043), from ``grace_steps`` (default: a ninth) on,
    once ``min_trials`` others have come that far.
    """

    grace_steps: Positive | None = None
    min_trials: Positive = 3


class HyperbandConfig(Config):
    """Successive halving in brackets that wait (https://arxiv.org/abs/1603.06560); who waits is
    paused."""

    reduction_factor: Annotated[int, Field(ge=2)] = 3


class PbtConfig(Config):
    """Population based training (https://arxiv.org/abs/1711.09846): every ``interval_steps`` steps
    (default: a tenth of the trial's) a trial of the worst ``quantile`` goes on from the state of
    one of the best, with values that are changed a little, or with probability ``resample`` drawn
    anew. The population are all ``num_samples`` trials.
    """

    interval_steps: Positive | None = None
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25


class PoolConfig(Config):
    """The evaluators that trials run on: ``size`` processes that stay warm between sweeps.

    A sweep reserves ``cpus`` for each of them while it runs; an idle pool reserves nothing. It
    begins with one and takes more as the cluster has room. ``min`` of the evaluators stay for good,
    the others end after ``idle_timeout_s`` without a sweep. Sweeps that run at the same time take
    turns: by ``priority``, and among equals each has its ``weight``'s share of the time.
    """

    size: Positive = 2
    min: NonNegative = 0
    idle_timeout_s: Seconds = 1800
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    cpus: Annotated[float, Field(gt=0)] = 1
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "ebbtide-pool"
    start_timeout_s: Seconds = 600


class TuneConfig(Config):
    """One sweep over a training job, or over any function.

    ``base`` is the training job's file, relative to the sweep's own. ``overrides`` and ``steps``
    change it for the trials only: the best ``train.yaml`` is the base with the chosen values.
    ``function`` (``module:function``) takes the place of ``base``: it is called with the values and
    a :class:`ebbtide.tune.trial.Context`, and ``overrides`` are values that do not change.
    A trial fails that takes more than ``trial_timeout_s``, or ``trial_memory_gb`` (10^9 bytes, of
    the memory of its process). A sweep ends at ``max_seconds`` of wall time or ``max_dollars``,
    with what it has by then.
    """

    base: Uri | None = None
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    overrides: dict[TrainKey, Any] = {}
    steps: Positive | None = None
    space: Annotated[dict[TrainKey, Domain], Field(min_length=1)]
    searcher: Literal["random", "grid", "optuna"] = "random"
    num_samples: Positive | None = None
    seed: NonNegative = 0
    metric: Annotated[str, Field(min_length=1)] = "validation_loss"
    mode: Literal["min", "max"] = "min"
    scheduler: Literal["none", "asha", "hyperband", "median", "pbt"] = "none"
    asha: AshaConfig = AshaConfig()
    hyperband: HyperbandConfig = HyperbandConfig()
    median: MedianConfig = MedianConfig()
    pbt: PbtConfig = PbtConfig()
    max_seconds: Seconds | None = None
    max_dollars: Dollars | None = None
    cost: CostConfig | None = None
    concurrency: Positive | None = None
    trial_timeout_s: Seconds = 3600
    trial_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_tries: Positive = 2
    pool: PoolConfig = PoolConfig()
    storage: Uri | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None

    @field_validator("space", "overrides", mode="before")
    @classmethod
    def _flat(cls, found: Any, info: ValidationInfo) -> Any:
        """``optimizer: {lr: ...}`` may be written for ``optimizer.lr: ...``; the later holds."""
        if not isinstance(found, Mapping) or info.data.get("function"):
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
        self._check_what_is_run()
        self._check_conditions()
        self._check_population()
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

    def _check_what_is_run(self) -> None:
        if (self.base is None) == (self.function is None):
            raise ValueError("set base, a training job's file, or function, and not both")
        if self.function is None:
            return
        if self.storage is None:
            raise ValueError("function: set storage, where the results go")
        if self.scheduler != "none" and self.steps is None:
            raise ValueError(
                f"scheduler: {self.scheduler} needs steps, the most that a trial makes"
            )

    def _check_population(self) -> None:
        """What population based training cannot do."""
        if self.scheduler != "pbt":
            return
        if self.searcher != "random":
            raise ValueError("scheduler: pbt searches by itself; it needs searcher: random")
        if self.is_conditional:
            raise ValueError("scheduler: pbt changes all keys; remove when from the space")
        fixed = [key for key in self.space if self.base and key.startswith(_SHAPING)]
        if fixed:
            raise ValueError(
                f"scheduler: pbt cannot search {fixed[0]}: a trial goes on with another's state"
            )

    def _check_conditions(self) -> None:
        before: set[str] = set()
        for key, domain in self.space.items():
            unknown = sorted(set(domain.when) - before)
            if unknown:
                raise ValueError(
                    f"space.{key}: when names {unknown[0]}, which is not searched before it"
                )
            before.add(key)

    @property
    def is_conditional(self) -> bool:
        return any(domain.when for domain in self.space.values())

    def active(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The sampled values without those whose condition does not hold."""
        found: dict[str, Any] = {}
        for key in self.space:
            if key in values and self.space[key].is_active(found):
                found[key] = values[key]
        return found

    def combinations(self) -> list[dict[str, Any]]:
        """Of a grid: every combination of choices that differs from the others."""
        found: list[dict[str, Any]] = [{}]
        for key, domain in reversed(self.space.items()):  # the first key changes fastest
            found = [{key: value, **rest} for rest in found for value in domain.values]
        ordered = [{key: values[key] for key in self.space} for values in found]
        unique = {repr(self.active(values)): self.active(values) for values in ordered}
        return list(unique.values())

    @property
    def num_trials(self) -> int:
        """How many configurations are tried."""
        return len(self.combinations()) if self.searcher == "grid" else self.num_samples or 0
