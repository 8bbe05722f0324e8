"""The ledger of a run: who used which node when, and at what price. Written as it happens.

Each process that knows something appends records with a :class:`LedgerWriter` to JSON-lines
segments of its own, ``<run_uri>/ledger/<writer>-<sequence>.jsonl``, with the promises of
:mod:`ebbtide.platform.segments`. Besides: a crash loses at most one flush interval of spans, and no
node time, which the accounting then finds uncovered. A price is fixed in the record that it is
written with: what changes later never changes the past.

Size: spans are merged to one record a flush. Flushes start at 2 s apart and end at 10 s, so two
weeks of one process are some 25 MB, in segments of 256 KiB.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import CostError, NotFound
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import (
    Alive,
    Attempt,
    Epoch,
    Finished,
    Ledger,
    LedgerFault,
    NodeDown,
    NodeUp,
    Record,
    SaveMissed,
    Served,
    Span,
    Started,
    Transfer,
    TrialEnded,
    encode,
    parse_segment,
)
from ebbtide.platform.segments import SegmentWriter
from ebbtide.platform.storage import Storage, open_storage

__all__ = [
    "Alive",
    "Attempt",
    "Epoch",
    "Finished",
    "Ledger",
    "LedgerFault",
    "LedgerWriter",
    "NodeDown",
    "NodeUp",
    "Owner",
    "Record",
    "SaveMissed",
    "Served",
    "Span",
    "SpanRecorder",
    "Started",
    "Transfer",
    "TrialEnded",
    "read_ledger",
]

_FOLDER = "ledger"
_FIRST_INTERVAL_S, _LAST_INTERVAL_S, _INTERVAL_GROWTH = 2.0, 10.0, 1.05
_MERGE_GAP_S = 0.05
"""Spans closer than this are merged; the small gaps in between count as idle."""


class SpanRecorder:
    """A meter's sink: merges the spans of one process, node and attempt between flushes.

    Time between steps (step None) goes with the steps around it. A restart is a record of its own,
    as the accounting has to know when an attempt first computes.
    """

    def __init__(self, node_id: str, attempt: int, write: Callable[[Span], None]) -> None:
        self._node_id, self._attempt, self._write = node_id, attempt, write
        self._lock = threading.Lock()
        self._cut: Callable[[], None] | None = None
        self._start_s = self._end_s = 0.0
        self._steps: tuple[int, int] | None = None
        self._seconds: dict[Owner, float] = {}

    def attach(self, cut: Callable[[], None]) -> None:
        self._cut = cut

    def span(
        self, start_s: float, end_s: float, seconds: Mapping[Owner, float], step: int | None
    ) -> None:
        """Add a span; in order of time. ``step`` is 1-based, None outside of steps."""
        with self._lock:
            if self._seconds and not self._continues(start_s, seconds, step):
                self._close()
            if not self._seconds:
                self._start_s, self._steps = start_s, None
            if step is not None:
                self._steps = (step if self._steps is None else self._steps[0], step)
            self._end_s = end_s
            for owner, owned_s in seconds.items():
                self._seconds[owner] = self._seconds.get(owner, 0.0) + owned_s

    def flush(self) -> None:
        """Write out what has been merged so far, the meter's open span included."""
        if self._cut is not None:
            self._cut()
        with self._lock:
            if self._seconds:
                self._close()

    def _continues(self, start_s: float, seconds: Mapping[Owner, float], step: int | None) -> bool:
        if not 0 <= start_s - self._end_s <= _MERGE_GAP_S:
            return False
        if (Owner.RESTART in seconds) != (Owner.RESTART in self._seconds):
            return False
        return step is None or self._steps is None or 0 <= step - self._steps[1] <= 1

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
        self._seconds = {}


class LedgerWriter:
    """Appends records of this process to the ledger of a run, whose storage it is given.

    Thread-safe. A context manager; ``close`` flushes.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock | None = None,
        *,
        name: str = "worker",
        first_interval_s: float = _FIRST_INTERVAL_S,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._pending: list[Record] = []
        self._recorders: list[SpanRecorder] = []
        self._segments = SegmentWriter(
            storage.child(_FOLDER),
            f"{name}-{uuid.uuid4().hex[:16]}",
            name="ledger",
            take=self._take,
            closing_line=lambda: encode(Alive(time_s=self._clock.time())),
            intervals_s=_intervals_s(first_interval_s),
        )

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
        return self._segments.flush()

    def close(self) -> None:
        """Flush and stop. A second call does nothing."""
        self._segments.close()

    def __enter__(self) -> LedgerWriter:
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
            recorders = list(self._recorders)
        for recorder in recorders:
            recorder.flush()
        with self._lock:
            pending, self._pending = self._pending, []
        return b"".join(encode(record) for record in pending)


def _intervals_s(first_s: float) -> Iterator[float]:
    while True:
        yield first_s
        first_s = min(first_s * _INTERVAL_GROWTH, _LAST_INTERVAL_S)


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
