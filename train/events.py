"""What happened in a run, in order: JSON lines on the run's storage, appended to and never changed.

Written by the run's driver under ``<run_uri>/events/``, a new set of segments for each driver, with
the promises of :mod:`ebbtide.platform.segments`. Steps appear once for every time they were made:
of a step that was made again after a failure, the last one is the one that was kept.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ebbtide.platform.segments import SegmentWriter
from ebbtide.platform.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_FOLDER = "events"
_FLUSH_INTERVAL_S = 2.0


class _Event(BaseModel):
    """``time_s`` is epoch seconds, of the process in which it happened."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time_s: float


class Started(_Event):
    """A driver took the run up (again)."""

    kind: Literal["started"] = "started"
    steps: int


class GenerationBegan(_Event):
    """The ranks of attempt ``attempt`` (0-based, never reused in a run) are up, on these nodes."""

    kind: Literal["generation"] = "generation"
    attempt: int
    world_size: int
    nodes: tuple[str, ...]


class Step(_Event):
    """A finished step, 1-based. ``samples`` is a digest of its sample ids in order."""

    kind: Literal["step"] = "step"
    attempt: int
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    epoch: int
    samples: str
    seconds: dict[str, float]


class StateDigest(_Event):
    """Digests of parameters and optimizer state after ``step`` steps, by tensor."""

    kind: Literal["state_digest"] = "state_digest"
    attempt: int
    step: int
    tensors: dict[str, str]


class Validation(_Event):
    """The validation loss after ``step`` steps."""

    kind: Literal["validation"] = "validation"
    attempt: int
    step: int
    loss: float


class Checkpoint(_Event):
    """A checkpoint of ``size_bytes`` was committed, ``took_s`` after it was begun."""

    kind: Literal["checkpoint"] = "checkpoint"
    attempt: int
    step: int
    uri: str
    took_s: float | None = None
    size_bytes: int | None = None


class CheckpointMissed(_Event):
    """A save came to nothing: ``left out`` as the one before took too long, or ``failed``."""

    kind: Literal["checkpoint_missed"] = "checkpoint_missed"
    attempt: int
    step: int
    why: Literal["left out", "failed"]
    message: str


class Notice(_Event):
    """The end of one of the run's nodes is announced, with its deadline if there is one."""

    kind: Literal["notice"] = "notice"
    node: str
    deadline_s: float | None


class LeaveAsked(_Event):
    """The running generation was asked to save and leave: a notice, growth, market or budget."""

    kind: Literal["leave_asked"] = "leave_asked"
    attempt: int
    reason: str


class Left(_Event):
    """The generation has saved after ``step`` steps and makes way for the next."""

    kind: Literal["left"] = "left"
    attempt: int
    step: int


class Failed(_Event):
    """The generation ended by a failure; ``counted`` against the job's ``max_failures`` or not."""

    kind: Literal["failed"] = "failed"
    attempt: int
    cause: str
    message: str
    counted: bool


class Skipped(_Event):
    """The batch of a step is left out from now on, after its loss was not finite."""

    kind: Literal["skipped"] = "skipped"
    attempt: int
    step: int


class Straggler(_Event):
    """A rank has worked ``ratio`` times as long as the median rank for many steps on end."""

    kind: Literal["straggler"] = "straggler"
    attempt: int
    step: int
    rank: int
    node: str
    ratio: float


class Remark(_Event):
    """A decision about the running generation that changed nothing, and why."""

    kind: Literal["remark"] = "remark"
    attempt: int
    text: str


class MarketChange(_Event):
    """The market's policy wants the run's nodes elsewhere from now on (``market`` None: nowhere,
    for now), and why."""

    kind: Literal["market"] = "market"
    market: str | None
    zone: str | None
    reason: str


class NodeLost(_Event):
    """A node on which the run had ranks is gone; ``announced`` if a notice came before."""

    kind: Literal["node_lost"] = "node_lost"
    node: str
    announced: bool


class Waiting(_Event):
    """The run has too few workers to (re)start."""

    kind: Literal["waiting"] = "waiting"
    needs: int
    has: int


class Finished(_Event):
    """The driver is done with the run: finished, failed or interrupted."""

    kind: Literal["finished"] = "finished"
    status: str
    step: int
    message: str | None = None


Event = (
    Started
    | GenerationBegan
    | Step
    | StateDigest
    | Validation
    | Checkpoint
    | CheckpointMissed
    | Notice
    | LeaveAsked
    | Left
    | Failed
    | Skipped
    | Straggler
    | Remark
    | MarketChange
    | NodeLost
    | Waiting
    | Finished
)
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def read_events(run: str | Storage) -> list[Event]:
    """Every event of a run (its URI or storage), oldest first; empty if there is none.

    A line that cannot be read (torn by a crash, or of a newer version) is left out.
    """
    storage = (open_storage(run) if isinstance(run, str) else run).child(_FOLDER)
    events: list[Event] = []
    for info in storage.list():
        if info.key.endswith(".jsonl"):
            events += parse_lines(storage.get(info.key), f"{storage.uri}/{info.key}")
    return events


def parse_lines(data: bytes, where: str) -> list[Event]:
    """The events of JSON lines; one that cannot be read is left out, with a warning."""
    events: list[Event] = []
    for line in data.splitlines():
        try:
            events.append(_ADAPTER.validate_json(line))
        except ValidationError:
            logger.warning("%s: an event cannot be read", where)
    return events


class EventLog:
    """Appends the events of one driver. Thread-safe.

    ``session`` is the driver's number in the run: segments sort by it, then by sequence.
    """

    def __init__(
        self, run: Storage, session: int, *, interval_s: float = _FLUSH_INTERVAL_S
    ) -> None:
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        self._segments = SegmentWriter(
            run.child(_FOLDER),
            f"{session:04d}",
            name="events",
            take=self._take,
            intervals_s=itertools.repeat(interval_s),
        )

    def write(self, events: Iterable[Event]) -> None:
        """Append; on storage within one flush interval, at once after a checkpoint or a start."""
        events = list(events)
        with self._lock:
            self._pending.extend(events)
        if any(isinstance(event, Checkpoint | GenerationBegan) for event in events):
            self._segments.flush_soon()

    def flush(self) -> bool:
        """Put everything on storage now; False (and a log line) if the storage refused."""
        return self._segments.flush()

    def close(self) -> None:
        """Flush and stop. A second call does nothing."""
        self._segments.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> bytes:
        with self._lock:
            pending, self._pending = self._pending, []
        return b"".join(event.model_dump_json().encode() + b"\n" for event in pending)
