"""The configuration of a training job: what ``ebbtide train FILE`` reads."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebbtide.platform.budget import BudgetConfig, Usd
from ebbtide.platform.config import Config, LocalFile
from ebbtide.platform.market.config import MarketConfig

Positive = Annotated[int, Field(ge=1, lt=2**53)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Uri = Annotated[str, Field(min_length=1)]
Spec = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``module:function``, imported from the working directory."""


class ModelConfig(Config):
    """Which model is trained.

    ``source`` is a ``config.json``, or a directory (local or ``s3://``) that holds one; with
    ``weights: pretrained`` the directory's safetensors are loaded, with ``random`` they are not
    looked at. ``factory`` names a user's own ``module:function`` instead.
    """

    source: Uri | None = None
    weights: Literal["random", "pretrained"] = "random"
    factory: Spec | None = None
    loss: Spec | None = None
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.source is None) == (self.factory is None):
            raise ValueError("give either model.source or model.factory")
        if self.factory is not None and self.weights == "pretrained":
            raise ValueError("model.weights: pretrained needs model.source")
        return self


class DataConfig(Config):
    """Prepared token shards (``ebbtide data prepare``) and how they are cut into sequences."""

    uri: Uri
    sequence_length: Annotated[int, Field(ge=2)]


class BatchConfig(Config):
    """The global batch, constant for the run, in sequences; cut into micro-batches of fixed shape.

    Micro-batches are what ranks share out: their number bounds how many ranks can be of use.
    """

    global_sequences: Positive
    micro_sequences: Positive

    @property
    def micro_batches(self) -> int:
        """How many micro-batches make one global batch."""
        return self.global_sequences // self.micro_sequences

    @model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if self.global_sequences % self.micro_sequences:
            raise ValueError("batch.global_sequences must be a multiple of batch.micro_sequences")
        return self


class OptimizerConfig(Config):
    """AdamW with global-norm clipping (``clip_norm`` 0 switches clipping off)."""

    lr: Annotated[float, Field(gt=0)]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(ge=0)] = 1.0


class ScheduleConfig(Config):
    """Linear warm-up, then a cosine down to ``min_lr_ratio`` of the peak at the last step."""

    warmup_steps: NonNegative = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class ValidationConfig(Config):
    """Validation loss over the first ``sequences`` of the validation split, every N steps.

    ``every_steps`` 0 validates only after the last step. ``where: pool`` leaves it to the
    evaluators of ``ebbtide tune``: the training saves when a validation is due, and goes on.
    """

    every_steps: NonNegative = 0
    sequences: Positive = 64
    where: Literal["here", "pool"] = "here"


class CheckpointConfig(Config):
    """When the state is saved (always after the last step, too), and what is kept.

    ``every``: a number of steps, a time such as ``30s``, ``5m`` or ``1h``, or ``auto``: as often as
    the measured cost of saves and evictions makes best (:mod:`ebbtide.train.rhythm`).
    ``keep_last``: the newest so many; ``keep_best``: that of the lowest validation loss, too.
    ``grace_s``: what a killed attempt has left unfinished is removed when nothing was added to it
    for that long. ``give_up_s``: for how long the save after the last step is tried. ``memory``:
    between saves, keep copies in the memory of the ranks' nodes and of their peers'.
    """

    every: int | str = "auto"
    keep_last: Positive = 3
    keep_best: bool = True
    grace_s: Annotated[float, Field(ge=0)] = 600
    give_up_s: Annotated[float, Field(ge=0)] = 300
    memory: bool = True

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, values: Any) -> Any:
        """``every_steps`` was the name of ``every`` when there were only steps."""
        if not isinstance(values, dict) or "every_steps" not in values:
            return values
        if "every" in values:
            raise ValueError("checkpoint.every_steps is the older name of every; give one of them")
        values = dict(values)
        return values | {"every": values.pop("every_steps")}

    @field_validator("every", mode="before")
    @classmethod
    def _is_known(cls, every: Any) -> Any:
        is_steps = isinstance(every, int) and not isinstance(every, bool) and 1 <= every < 2**53
        if not is_steps and every != "auto" and not _seconds(every):
            raise ValueError("must be a number of steps, a time such as 30s, 5m or 1h, or auto")
        return every

    @property
    def every_s(self) -> float | None:
        """The seconds between two saves, if they are given."""
        return _seconds(self.every)


def _seconds(text: object) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text) if isinstance(text, str) else None
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else None


class WorkersConfig(Config):
    """Elastic workers: the run starts with what there is between ``min`` and ``max``."""

    min: Positive = 1
    max: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1
    gpus: Annotated[float, Field(ge=0)] = 0
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    threads: Positive = 1
    start_timeout_s: Annotated[float, Field(gt=0)] = 600
    max_failures: NonNegative = 3

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if self.max < self.min:
            raise ValueError("workers.max must not be below workers.min")
        if not self.cpus and not self.gpus:
            raise ValueError("a worker needs workers.cpus or workers.gpus")
        return self


class CostConfig(Config):
    """What a node of this job costs: a type of the price catalogue, and its market.

    Nodes that carry the Ray labels ``ebbtide.dev/instance-type`` and ``ebbtide.dev/market`` are
    priced by those; this is for nodes without. ``catalogue`` is looked at again when it changes.
    ``live: aws`` takes AWS's own prices before the catalogue's, where there are credentials.
    ``egress_usd_per_gb`` is what a GB costs on its way from the nodes to the run's storage, where
    that lies in another network.
    """

    instance_type: str | None = None
    market: Literal["spot", "on_demand", "on_prem"] = "on_demand"
    catalogue: LocalFile | None = None
    live: Literal["aws"] | None = None
    egress_usd_per_gb: Usd | None = None


class TrainConfig(Config):
    """One training job.

    ``reduction: exact`` adds gradients up in an order that is the same for any number of ranks, so
    that a run is bitwise the same whatever happens to its nodes; ``plain`` as FSDP2 does by itself.
    ``digest`` logs a digest of the training state at every step (``ebbtide diff`` compares them).
    ``on_nan``: what a loss or gradient that is not finite does. ``skip`` goes back to the newest
    checkpoint and leaves that batch out, once; ``stop`` (and the second time) ends the run.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    storage: Uri
    seed: NonNegative = 0
    steps: Positive
    precision: Literal["fp32", "bf16"] = "fp32"
    reduction: Literal["exact", "plain"] = "exact"
    digest: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    workers: WorkersConfig = WorkersConfig()
    cost: CostConfig = CostConfig()
    budget: BudgetConfig = BudgetConfig()
    market: MarketConfig | None = None

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of one global batch, before masking."""
        return self.batch.global_sequences * self.data.sequence_length

    @property
    def run_uri(self) -> str:
        """Where the run keeps checkpoints, ledger and events."""
        return f"{self.storage.rstrip('/')}/{self.name}"

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.schedule.warmup_steps > self.steps:
            raise ValueError("schedule.warmup_steps must not exceed steps")
        if self.workers.max > self.batch.micro_batches:
            raise ValueError(
                f"workers.max is {self.workers.max}, but a step has only "
                f"{self.batch.micro_batches} micro-batches to share out"
            )
        return self
