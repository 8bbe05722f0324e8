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
from ebbtide.train.events import Event, Step, parse_lines
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
    """The events up to the checkpoint ``start`` that the run's log, ``events``, ends too early for.

    Empty if the log has the checkpoint's last step, or if the checkpoint brings no events.
    """
    last = next((event for event in reversed(events) if isinstance(event, Step)), None)
    if start is None or (last is not None and last.step >= start.step):
        return []
    storage = open_storage(start.uri)
    try:
        told = parse_lines(storage.get(EVENTS), f"{start.uri}/{EVENTS}")
    except NotFound:
        return []
    if last is None:
        return told
    at = next((index for index, event in enumerate(told) if event == last), -1)
    known = [event for event in events if event.time_s >= last.time_s]
    return [event for event in told[at + 1 :] if event.time_s >= last.time_s and event not in known]
