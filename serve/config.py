"""The configuration of an endpoint: what ``ebbtide serve FILE`` reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebbtide.platform.config import Config
from ebbtide.platform.prices import UsdPerHour
from ebbtide.serve.keys import ApiKey, Limits
from ebbtide.serve.speculation import Speculation
from ebbtide.serve.split import Mode

Role = Literal["prefill", "decode"]
Scheme = Literal["int8", "w4", "fp8"]
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

RESERVED_ENGINE_OPTIONS = {
    "model": "model.uri",
    "served_model_name": "model.name",
    "tokenizer": "model.uri",
    "max_model_len": "model.max_model_len",
    "dtype": "dtype",
    "device": "accelerator",
    "tensor_parallel_size": "prefill.gpus and decode.gpus",
    "kv_cache_memory_bytes": "prefill.kv_cache_gb and decode.kv_cache_gb",
    "speculative_config": "speculation",
    "quantization": "quantization",
    "kv_transfer_config": None,
    "worker_extension_cls": None,
    "distributed_executor_backend": None,
    "enable_log_requests": None,
}
"""Options of vLLM that ebbtide sets itself, and the key that sets them here (if there is one)."""


class ModelConfig(Config):
    """The exported directory (local or ``s3://``), and the name that clients ask for."""

    uri: Annotated[str, Field(min_length=1)]
    name: Name | None = None
    max_model_len: Positive | None = None


class HttpConfig(Config):
    """Where the endpoint listens, on loopback unless told otherwise, and to whom it answers.

    ``limits`` are those of each key that has none of its own, or of all clients together where
    there are no keys. ``tls_certificate`` and ``tls_key`` are PEM files on the head node.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tls_certificate: str | None = None
    tls_key: str | None = None
    keys: tuple[ApiKey, ...] = ()
    limits: Limits = Limits()
    max_body_bytes: Positive = 4 * 2**20

    @model_validator(mode="after")
    def _consistent(self) -> HttpConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        for of in ("name", "sha256"):
            if len({getattr(key, of) for key in self.keys}) < len(self.keys):
                raise ValueError(f"two keys have the same {of}")
        return self


class Replicas(Config):
    """Between how many replicas a role has, by what is asked."""

    min: Annotated[int, Field(ge=0)] = 1
    max: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self


class ScalingConfig(Config):
    """What the number of replicas is to keep, and how long it is kept itself.

    ``ttft_s`` bounds the time that queued prompts take to be computed, ``gap_s`` the mean gap
    between tokens. Replicas are taken away after ``down_after_s`` in which they were not needed,
    and all of them after ``idle_s`` without a request. A request waits up to ``wait_s`` for a first
    worker, ``max_waiting`` of them at most.
    """

    ttft_s: Annotated[float, Field(gt=0)] = 1.0
    gap_s: Annotated[float, Field(gt=0)] = 0.05
    down_after_s: Annotated[float, Field(gt=0)] = 120
    idle_s: Annotated[float, Field(gt=0)] = 600
    wait_s: Annotated[float, Field(gt=0)] = 300
    max_waiting: Positive = 1000


class RoleConfig(Config):
    """The replicas of one role, prefill or decode, and what each of them has.

    ``gpus`` above 1 splits the model over them (tensor parallelism). ``kv_cache_gb`` (GiB) is the
    memory for keys and values; None is 1 GiB on CPUs and what vLLM finds free on GPUs.
    ``usd_per_hour`` is what one replica costs; None is unknown.
    """

    replicas: Positive | Replicas = 1
    cpus: Annotated[float, Field(gt=0)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    threads: Positive = 1
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    usd_per_hour: UsdPerHour | None = None

    @property
    def least(self) -> int:
        """The fewest replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    @property
    def most(self) -> int:
        """The most replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max


class ServeConfig(Config):
    """One endpoint: a model served by separate prefill and decode workers.

    ``mode``: ``auto`` has prompts with ``split_min_tokens`` new tokens or more computed by prefill
    workers, ``split`` all, and ``colocated`` has decode workers only. A stream goes on elsewhere
    when its worker has been silent for ``stall_s``. ``quantization`` serves the weights in fewer
    bits, ``speculation`` guesses tokens ahead; ``ebbtide serve check`` says what both bring.
    ``dtype`` None serves the weights in the type they were exported in (bf16 if quantized).
    ``engine`` holds further options of vLLM, for both roles alike. Streams of a model that is
    replaced have ``drain_s`` to end. ``ledger`` is the URI that ``ebbtide cost`` is asked for,
    ``traces`` where spans are sent by OTLP over HTTP.
    """

    name: Name
    model: ModelConfig
    http: HttpConfig = HttpConfig()
    accelerator: Literal["cpu", "gpu"] = "cpu"
    dtype: Literal["fp32", "bf16"] | None = None
    mode: Mode = "auto"
    split_min_tokens: Positive = 512
    stall_s: Annotated[float, Field(gt=0)] = 1.5
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    speculation: Speculation | None = None
    quantization: Scheme | None = None
    scaling: ScalingConfig = ScalingConfig()
    engine: dict[str, Any] = {}
    start_timeout_s: Annotated[float, Field(gt=0)] = 600
    drain_s: Annotated[float, Field(ge=0)] = 600
    ledger: Annotated[str, Field(min_length=1)] | None = None
    traces: Annotated[str, Field(pattern=r"^https?://")] | None = None

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.model.name or self.name

    @property
    def endpoint(self) -> str:
        """The base URL for clients on the serving machine."""
        host = self.http.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        scheme = "https" if self.http.tls_certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.http.port}/v1"

    @property
    def roles(self) -> dict[Role, RoleConfig]:
        """The roles that there are workers of."""
        if self.mode == "colocated":
            return {"decode": self.decode}
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def counts(self) -> dict[Role, int]:
        """How many workers of each role there are to be at first."""
        return {role: max(1, own.least) for role, own in self.roles.items()}

    @property
    def scales(self) -> bool:
        """Whether the number of workers follows what is asked."""
        return any(own.least < own.most for own in self.roles.values())

    @property
    def may_be_none(self) -> bool:
        """Whether there are no workers at all while nobody asks."""
        return all(own.least == 0 for own in self.roles.values())

    @field_validator("engine")
    @classmethod
    def _not_reserved(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for key in engine.keys() & RESERVED_ENGINE_OPTIONS.keys():
            instead = RESERVED_ENGINE_OPTIONS[key]
            hint = f"set {instead} instead" if instead else "ebbtide sets it"
            raise ValueError(f"engine.{key} is reserved: {hint}")
        return engine

    @model_validator(mode="after")
    def _none_together(self) -> ServeConfig:
        if not self.may_be_none and any(own.least == 0 for own in self.roles.values()):
            raise ValueError("replicas.min of 0 goes for prefill and decode together")
        return self

    @model_validator(mode="after")
    def _accelerated(self) -> ServeConfig:
        for name, role in (("prefill", self.prefill), ("decode", self.decode)):
            if self.accelerator == "gpu" and not role.gpus:
                raise ValueError(f"accelerator: gpu needs {name}.gpus of 1 or more")
            if self.accelerator == "cpu" and role.gpus:
                raise ValueError(f"{name}.gpus needs accelerator: gpu")
        return self

    @model_validator(mode="after")
    def _quantizable(self) -> ServeConfig:
        if self.quantization == "fp8" and self.accelerator == "cpu":
            raise ValueError("quantization: fp8 needs accelerator: gpu; take int8 or w4 on CPUs")
        if self.quantization is not None and self.dtype == "fp32":
            raise ValueError("quantization needs dtype: bf16; vLLM computes the rest in 16 bits")
        return self
