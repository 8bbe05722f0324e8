"""The ledger of a run: who used which node when, and at what price. Written as it happens.

Each process that knows something appends records with a :class:`LedgerWriter` to JSON-lines
segments of its own, ``<run_uri>/ledger/<writer>-<sequence>.jsonl``. Promises: writing a record
never waits for storage (a daemon thread flushes); a flush replaces the writer's newest segment by a
longer one in one atomic put, so a reader sees whole records; a crash loses at most one flush
interval of spans, and no node time, which the accounting then finds uncovered. A price is fixed in
the record that it is written with: what changes later never changes the past.

Size: spans are merged to one record a flush. Flushes start at 2 s apart and end at 10 s, so two
weeks of one process are some 25 MB, in segments of 256 KiB.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import CostError, EbbtideError, NotFound
from ebbtide.platform.meter import Owner as Owner  # a record's word: also imported from here
from ebbtide.platform.prices import Market
from ebbtide.platform.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_FOLDER = "ledger"
_SEGMENT_BYTES = 256 * 1024
_FIRST_INTERVAL_S, _LAST_INTERVAL_S, _INTERVAL_GROWTH = 2.0, 10.0, 1.05
_MERGE_GAP_S = 0.05
"""Spans closer than this are merged; the small gaps in between count as idle."""

Seconds = Annotated[FiniteFloat, Field(ge=0)]
Price = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]


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


class Alive(_Record):
    """The writer of the segment lived at ``time_s``; replaced at each flush."""

    kind: Literal["alive"] = "alive"
    time_s: Seconds


class Finished(_Record):
    """The driver is done with the run, and with its nodes, in this way."""

    kind: Literal["finished"] = "finished"
    time_s: Seconds
    status: str


Record = Started | NodeUp | NodeDown | Attempt | Span | Alive | Finished
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


class SpanRecorder:
    """A meter's sink: merges the spans of one process, node and attempt between flushes."""

    def __init__(self, node_id: str, attempt: int, write: Callable[[Span], None]) -> None:
        self._node_id, self._attempt, self._write = node_id, attempt, write
        self._lock = threading.Lock()
        self._cut: Callable[[], None] | None = None
        self._open = False
        self._start_s = self._end_s = 0.0
        self._steps: tuple[int, int] | None = None
        self._seconds: dict[Owner, float] = {}

    def attach(self, cut: Callable[[], None]) -> None:
        self._cut = cut

    def span(self, owner: Owner, start_s: float, end_s: float, step: int | None) -> None:
        """Add a span; in order of time. ``step`` is 1-based, None outside of steps."""
        with self._lock:
            if self._open and not self._continues(start_s, step):
                self._close()
            if not self._open:
                self._open, self._start_s = True, start_s
                self._steps = None if step is None else (step, step)
            if step is not None and self._steps is not None:
                self._steps = (self._steps[0], step)
            self._end_s = end_s
            self._seconds[owner] = self._seconds.get(owner, 0.0) + end_s - start_s

    def flush(self) -> None:
        """Write out what has been merged so far, the meter's open span included."""
        if self._cut is not None:
            self._cut()
        with self._lock:
            if self._open:
                self._close()

    def _continues(self, start_s: float, step: int | None) -> bool:
        if not 0 <= start_s - self._end_s <= _MERGE_GAP_S:
            return False
        if step is None or self._steps is None:
            return step is None and self._steps is None
        return 0 <= step - self._steps[1] <= 1

    def _close(self) -> None:
        first, last = self._steps or (None, None)
        self._write(
            Span(
                node_id=self._node_id,
                attempt=self._attempt,
                start_s=round(self._start_s, 6),
                end_s=round(self._end_s, 6),
                seconds={owner: round(s, 6) for owner, s in self._seconds.items()},
                first_step=first,
                last_step=last,
            )
        )
        self._open, self._seconds = False, {}


class LedgerWriter:
    """Appends records of this process to the ledger of a run, whose storage it is given.

    Thread-safe. A context manager; ``close`` flushes. A storage fault is logged and tried again at
    the next flush: bookkeeping never ends a run.
    """

    def __init__(self, storage: Storage, clock: Clock | None = None, name: str = "worker") -> None:
        self._storage = storage.child(_FOLDER)
        self._clock: Clock = clock or SystemClock()
        self._writer = f"{name}-{uuid.uuid4().hex[:16]}"
        self._lock, self._flushing = threading.Lock(), threading.Lock()
        self._pending: list[Record] = []
        self._recorders: list[SpanRecorder] = []
        self._segment, self._sequence = bytearray(), 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbtide-ledger", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Append a record; it is on storage within one flush interval."""
        with self._lock:
            self._pending.append(record)

    def recorder(self, node_id: str, attempt: int) -> SpanRecorder:
        """The sink for the meter of an attempt on this process's node."""
        recorder = SpanRecorder(node_id, attempt, self.write)
        with self._lock:
            self._recorders.append(recorder)
        return recorder

    def flush(self) -> bool:
        """Put everything on storage now; False (and a log line) if the storage refused."""
        with self._flushing:
            with self._lock:
                recorders = list(self._recorders)
            for recorder in recorders:
                recorder.flush()
            with self._lock:
                pending, self._pending = self._pending, []
            self._segment += b"".join(_line(record) for record in pending)
            alive = _line(Alive(time_s=self._clock.time()))
            key = f"{self._writer}-{self._sequence:06d}.jsonl"
            try:
                self._storage.put(key, bytes(self._segment) + alive)
            except EbbtideError as error:
                logger.warning("the ledger could not be written, will try again: %s", error)
                return False
            if len(self._segment) >= _SEGMENT_BYTES:
                self._segment, self._sequence = bytearray(), self._sequence + 1
            return True

    def close(self) -> None:
        """Flush and stop. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        if not self.flush():
            logger.error("the last records of the ledger under %s are lost", self._storage.uri)

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        interval_s = _FIRST_INTERVAL_S
        while not self._closed.wait(interval_s):
            self.flush()
            interval_s = min(interval_s * _INTERVAL_GROWTH, _LAST_INTERVAL_S)


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_none=False).encode() + b"\n"


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


def read_ledger(run: str | Storage) -> Ledger:
    """The ledger of a run (its URI or storage), which may be alive.

    Damaged lines are reported in ``faults``, not raised. Raises CostError if there is no ledger.
    """
    storage = (open_storage(run) if isinstance(run, str) else run).child(_FOLDER)
    keys = [info.key for info in storage.list() if info.key.endswith(".jsonl")]
    if not keys:
        raise CostError(
            f"{storage.uri}: no ledger here; give the URI of a run that has started, "
            "or its name with --storage"
        )

    def read(key: str) -> Ledger:
        try:
            return parse_segment(key, storage.get(key))
        except NotFound:
            return Ledger((), (LedgerFault(key, 0, "removed while it was read"),))

    with ThreadPoolExecutor(8) as pool:
        return _joined(pool.map(read, keys))


def _joined(parts: Iterable[Ledger]) -> Ledger:
    parts = list(parts)
    return Ledger(
        tuple(record for part in parts for record in part.records),
        tuple(fault for part in parts for fault in part.faults),
    )
