"""The sweep's journal: what its driver has heard from trials, in order, on the sweep's storage.

JSON lines in ``journal/<attempt>-<segment>.jsonl``, one attempt for each driver. Promises: a line
is on storage at most ``INTERVAL_S`` after its event, or at once for a trial that took long; a
killed driver leaves whole lines. Nothing of Ray's is stored: the searcher's and the scheduler's
state follows from hearing the same again (:mod:`ebbtide.tune.past`).

Events: ``attempt`` (a driver begins), ``started`` (a trial's values, at its first start),
``reported``, ``failed``, ``ended`` (its seconds), ``spent`` (what the attempt has cost so far).
``trial`` is the number of a trial in the sweep.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ebbtide.platform.clock import Clock
from ebbtide.platform.segments import SegmentWriter
from ebbtide.platform.storage import Storage

INTERVAL_S = 0.25
_FOLDER = "journal"
_LONG_TRIAL_S = 1.0

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What earlier drivers wrote: ``attempts`` of them, which took ``seconds`` of wall time and
    spent ``usd`` together."""

    events: Sequence[Event] = ()
    attempts: int = 0
    seconds: float = 0.0
    usd: Decimal = Decimal(0)


def read(storage: Storage) -> Record:
    """The journal of the sweep at ``storage``; an empty one if there is none."""
    folder = storage.child(_FOLDER)
    by_attempt: dict[str, list[Event]] = {}
    for info in folder.list():
        lines = folder.get(info.key).splitlines()
        attempt = by_attempt.setdefault(info.key.partition("-")[0], [])
        attempt.extend(json.loads(line) for line in lines)
    return Record(
        events=[event for attempt in by_attempt.values() for event in attempt],
        attempts=max((int(name) for name in by_attempt), default=0),
        seconds=sum(_seconds(attempt) for attempt in by_attempt.values()),
        usd=sum((_usd(attempt) for attempt in by_attempt.values()), Decimal(0)),
    )


def _seconds(attempt: Sequence[Event]) -> float:
    return max(event["at_s"] for event in attempt) - attempt[0]["at_s"] if attempt else 0.0


def _usd(attempt: Sequence[Event]) -> Decimal:
    """What an attempt had spent when it was heard of last."""
    return max((Decimal(event["usd"]) for event in attempt if "usd" in event), default=Decimal(0))


class Journal:
    """One driver's part of it. Writing never waits for storage."""

    def __init__(self, storage: Storage, attempt: int, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._new = bytearray()
        self._writer = SegmentWriter(
            storage.child(_FOLDER),
            f"{attempt:04d}",
            name="journal of the sweep",
            take=self._take,
            intervals_s=itertools.repeat(INTERVAL_S),
        )
        self.write("attempt")

    def write(self, event: str, **fields: Any) -> None:
        """Note an event, at this moment unless ``at_s`` is given."""
        line = json.dumps({"event": event, "at_s": self._clock.time(), **fields}, default=str)
        with self._lock:
            self._new += line.encode() + b"\n"
        if fields.get("seconds", 0.0) >= _LONG_TRIAL_S:
            self._writer.flush_soon()

    def close(self) -> None:
        """Put the rest on storage."""
        self._writer.close()

    def _take(self) -> bytes:
        with self._lock:
            taken, self._new = bytes(self._new), bytearray()
        return taken
