"""How long a run's steps, saves and restarts take, from its events. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

from ebbtide.train.elastic import Running
from ebbtide.train.events import Checkpoint, Event, Failed, GenerationBegan, Left, Step

_RECENT_STEPS = 20
_RECENT_SAVES = 5


class Pace:
    """Built by adding events in order. ``started_s``: when the driver started (epoch seconds)."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._step, self._last_step_s = 0, 0.0
        self._is_first = True
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._saves_s: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._ended_s: float | None = None
        self._pause_s: float | None = None
        self._losses = 0

    def add(self, event: Event) -> None:
        """Take an event into account."""
        match event:
            case GenerationBegan():
                self._is_first = True
                self._steps_s.clear()
            case Step():
                self._add_step(event)
            case Checkpoint():
                if event.took_s is not None:
                    self._saves_s.append(event.took_s)
            case Left() | Failed():
                self._ended_s = event.time_s
                self._losses += isinstance(event, Failed)
            case _:
                pass

    def measured(self, running: Running, now_s: float) -> Running:
        """The running generation with what has been measured."""
        return replace(
            running,
            step=self._step,
            step_s=statistics.median(self._steps_s) if self._steps_s else None,
            save_s=max(self._saves_s, default=None),
            pause_s=self._pause_s,
            losses=self._losses,
            age_s=now_s - self._started_s,
        )

    def _add_step(self, event: Step) -> None:
        if self._is_first:  # it compiles, connects, and follows a restart
            if self._ended_s is not None:
                self._pause_s, self._ended_s = event.time_s - self._ended_s, None
        else:
            self._steps_s.append(event.time_s - self._last_step_s)
        self._is_first = False
        self._step, self._last_step_s = event.step, event.time_s
