"""The records of a run's ledger, and their JSON lines.

Promises: what :func:`encode` writes, :func:`parse_segment` reads back equal; a line that is torn,
damaged or of an unknown kind is reported with its place, and the others are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market

Seconds = Annotated[FiniteFloat, Field(ge=0)]
Price = Annotated[Decimal, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    """Times are epoch seconds. Fields of a newer version are ignored, so old readers go on."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Started(_Record):
    """A driver took the run up (again). Nodes of an earlier driver that crashed end before it."""

    kind: Literal["started"] = "started"
    time_s: Seconds


class NodeUp(_Record):
    """From now on the run has (and pays for) a node. None is an unknown price, never 0.

    A second record for a node that is up changes its price from then on.
    """

    kind: Literal["node_up"] = "node_up"
    node_id: str
    time_s: Seconds
    instance_type: str | None
    market: Market
    zone: str | None = None
    usd_per_hour: Price | None
    usd_per_hour_on_demand: Price | None


class NodeDown(_Record):
    """The node is gone, or given back."""

    kind: Literal["node_down"] = "node_down"
    node_id: str
    time_s: Seconds


class Attempt(_Record):
    """A generation starts; ``index`` is unique in the run, ``first_step`` steps were finished."""

    kind: Literal["attempt"] = "attempt"
    index: Annotated[int, Field(ge=0)]
    start_s: Seconds
    first_step: Annotated[int, Field(ge=0)]


class Epoch(_Record):
    """From now on the run makes steps of this pass over its data (0-based), or gets ready for them.

    After a restart the same one may come again, or an earlier one.
    """

    kind: Literal["epoch"] = "epoch"
    index: Annotated[int, Field(ge=0)]
    start_s: Seconds


class Span(_Record):
    """What one process on a node did from ``start_s`` to ``end_s``: seconds by owner.

    The seconds may sum to less than the interval. ``first_step`` and ``last_step`` (1-based) are
    the steps at work in it; None outside of steps.
    """

    kind: Literal["span"] = "span"
    node_id: str
    attempt: Annotated[int, Field(ge=0)]
    start_s: Seconds
    end_s: Seconds
    seconds: dict[Owner, Seconds]
    first_step: int | None = None
    last_step: int | None = None

    @model_validator(mode="after")
    def _forwards(self) -> Span:
        if self.end_s < self.start_s or (self.last_step or 0) < (self.first_step or 0):
            raise ValueError("a span must not end before it starts")
        return self


class Transfer(_Record):
    """Bytes that left the nodes' network, at a price for each GB (10^9 bytes), as a save's do."""

    kind: Literal["transfer"] = "transfer"
    time_s: Seconds
    attempt: Annotated[int, Field(ge=0)]
    size_bytes: Annotated[int, Field(ge=0)]
    usd_per_gb: Price


class Alive(_Record):
    """The writer of the segment lived at ``time_s``; replaced at each flush."""

    kind: Literal["alive"] = "alive"
    time_s: Seconds


class SaveMissed(_Record):
    """A checkpoint that fell due after ``step`` steps and was left out, or that has failed."""

    kind: Literal["save_missed"] = "save_missed"
    time_s: Seconds
    attempt: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    why: str


class TrialEnded(_Record):
    """A trial of a sweep has ended. ``usd`` is None where its price is unknown.

    ``saved_s``: seconds of start-up that a process of its own would have had, and it had not.
    """

    kind: Literal["trial_ended"] = "trial_ended"
    time_s: Seconds
    number: Annotated[int, Field(ge=0)]
    status: str
    seconds: Seconds
    usd: Annotated[Decimal, Field(ge=0, allow_inf_nan=False)] | None
    saved_s: Seconds = 0.0


Count = Annotated[int, Field(ge=0)]


class Served(_Record):
    """What the requests of a key that an endpoint has ended had, since the record before.

    Seconds are sums over the requests: until there was a worker for them (``queue``), at a prefill
    worker (``prefill``), from asking a decode worker to its first token (``transfer``, or the
    prompt itself), and from then to the last one (``decode``). Their sum over all keys and records
    is what the endpoint has served.
    """

    kind: Literal["served"] = "served"
    time_s: Seconds
    key: str
    requests: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    decode_s: Seconds = 0.0

    def __add__(self, other: Served) -> Served:
        """Of one key; as of the later of both."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _OF_SERVED}
        return Served(time_s=max(self.time_s, other.time_s), key=self.key, **sums)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


_OF_SERVED = sorted(Served.model_fields.keys() - {"kind", "time_s", "key"})


class Finished(_Record):
    """The driver is done with the run, and with its nodes, in this way."""

    kind: Literal["finished"] = "finished"
    time_s: Seconds
    status: str


Record = (
    Started
    | NodeUp
    | NodeDown
    | Attempt
    | Epoch
    | Span
    | Transfer
    | Alive
    | SaveMissed
    | TrialEnded
    | Served
    | Finished
)
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def encode(record: Record) -> bytes:
    """One line of a segment."""
    return record.model_dump_json().encode() + b"\n"


@dataclass(frozen=True)
class LedgerFault:
    """A line of a segment that could not be read: torn by a crash, damaged, or unknown."""

    key: str
    line: int
    reason: str


@dataclass(frozen=True)
class Ledger:
    """What was read: the records in no certain order, and what had to be left out."""

    records: tuple[Record, ...]
    faults: tuple[LedgerFault, ...] = ()


def parse_segment(key: str, data: bytes) -> Ledger:
    """The records of one segment; a line that is not one becomes a fault."""
    records: list[Record] = []
    faults: list[LedgerFault] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_ADAPTER.validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            faults.append(LedgerFault(key, number, f"{place} {first['msg']}".strip()))
    return Ledger(tuple(records), tuple(faults))
