"""The events of the minute before a save, stored with the checkpoint.

Promise: a driver that is killed before it has stored what its ranks told takes no step with it that
is in a checkpoint: the next driver finds them there. Rank 0 remembers what it told; the driver's
own log is at most a few seconds behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ebbtide.platform.errors import NotFound
from ebbtide.platform.storage import open_storage
from ebbtide.train.events import Checkpoint, Event, parse_lines
from ebbtide.train.manifest import EVENTS, CheckpointInfo

KEPT_S = 60.0
KEPT_EVENTS = 5000


class LastEvents:
    """What rank 0 has told of late. ``until`` may be called in another thread."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)

    def add(self, event: Event) -> None:
        """Remember an event, for a minute."""
        while self._events and self._events[0].time_s < event.time_s - KEPT_S:
            self._events.popleft()
        self._events.append(event)

    def until(self, step: int) -> bytes:
        """Those of the steps up to ``step``, one JSON line each."""
        kept = [event for event in tuple(self._events) if getattr(event, "step", 0) <= step]
        return b"".join(event.model_dump_json().encode() + b"\n" for event in kept)


def unwritten(start: CheckpointInfo | None, events: Sequence[Event]) -> list[Event]:
    """What the run's log, ``events``, lacks of the events up to the checkpoint ``start``.

    A driver stores what it is told in order: one that has stored that the checkpoint was committed
    lacks nothing before it, and any other lacks what was told after the last event that it has.
    """
    if start is None or any(_commits(event, start) for event in reversed(events)):
        return []
    storage = open_storage(start.uri)
    try:
        told = parse_lines(storage.get(EVENTS), f"{start.uri}/{EVENTS}")
    except NotFound:  # of an earlier version
        return []
    oldest_s = min((event.time_s for event in told), default=0.0)
    known = [event for event in events if event.time_s >= oldest_s]
    last = max((index for index, event in enumerate(told) if event in known), default=-1)
    return told[last + 1 :]


def _commits(event: Event, start: CheckpointInfo) -> bool:
    return isinstance(event, Checkpoint) and event.uri.rstrip("/").endswith(f"/{start.name}")
