"""What a run's events add up to: attempts, kept steps, steps lost and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ebbtide.train.events import (
    Event,
    Failed,
    GenerationBegan,
    LeaveAsked,
    Left,
    Skipped,
    Started,
    Step,
    Validation,
)
from ebbtide.train.rhythm import Interruptions

_RATE_STEPS = 20


@dataclass(frozen=True)
class AttemptHistory:
    """One generation. ``ended`` is None while it runs, else notice, growth, market, budget,
    failure or driver.

    ``first_step`` and ``last_step`` (1-based) are the steps that it made, None if it made none;
    ``steps_lost`` are those of them that the next attempt had to make again.
    """

    attempt: int
    world_size: int
    began_s: float
    nodes: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    ended: str | None = None
    steps_lost: int = 0


class History:
    """Built by adding events in order; holds one entry a step, and may be asked at any time.

    ``tokens`` are those of the kept steps, ``last`` is the newest step, of whichever attempt.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.sessions = 0
        self.attempts: list[AttemptHistory] = []
        self.kept: dict[int, Step] = {}
        self.last: Step | None = None
        self.tokens = 0
        self.skipped: list[int] = []
        self.validation_loss: float | None = None
        self._asked: str | None = None
        self._observed_s = 0.0
        self._seen_s: float | None = None
        self._recent: list[Step] = []
        self.add(events)

    def add(self, events: Iterable[Event]) -> None:
        """Take these events into account."""
        for event in events:
            self._add(event)

    @property
    def next_attempt(self) -> int:
        """The first attempt number that has not been used."""
        made = [self.last.attempt] if self.last is not None else []
        return 1 + max([*made, *(each.attempt for each in self.attempts)], default=-1)

    @property
    def placed(self) -> tuple[str, ...]:
        """The nodes of the newest attempt's ranks."""
        return self.attempts[-1].nodes if self.attempts else ()

    @property
    def interruptions(self) -> Interruptions:
        """How often the run was ended from outside, in how much time of its own."""
        ended = sum(each.ended in ("notice", "failure") for each in self.attempts)
        return Interruptions(ended, self._observed_s)

    @property
    def world_sizes(self) -> list[int]:
        """Each attempt's number of workers."""
        return [each.world_size for each in self.attempts]

    def steps_lost(self, *ended: str) -> int:
        """Steps made again after attempts that ended in one of these ways (in any, if none)."""
        return sum(each.steps_lost for each in self.attempts if not ended or each.ended in ended)

    @property
    def tokens_per_s(self) -> float | None:
        """Over the newest steps of the newest attempt; None before its second step."""
        steps = self._recent
        if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
            return None
        return sum(step.tokens for step in steps[1:]) / (steps[-1].time_s - steps[0].time_s)

    def _add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._seen_s = None  # it may have stood for days
        elif self._seen_s is not None:
            self._observed_s += max(0.0, event.time_s - self._seen_s)
        self._seen_s = max(event.time_s, self._seen_s or event.time_s)
        match event:
            case Started():
                self.sessions += 1
                self._end("driver")
            case GenerationBegan():
                self._end("failure")
                self._asked = None
                self._recent = []
                self.attempts.append(
                    AttemptHistory(event.attempt, event.world_size, event.time_s, event.nodes)
                )
            case Step():
                self._step(event)
            case Validation():
                self.validation_loss = event.loss
            case LeaveAsked():
                self._asked = event.reason.partition(":")[0]
            case Left():
                self._end(self._asked or "notice")
            case Failed():
                self._end("failure")
            case Skipped():
                self.skipped.append(event.step)
            case _:
                pass

    def _end(self, how: str) -> None:
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1] = replace(self.attempts[-1], ended=how)

    def _step(self, step: Step) -> None:
        self._recent = [*self._recent[-_RATE_STEPS:], step]
        self.last = step
        while self.kept and next(reversed(self.kept)) >= step.step:
            _, again = self.kept.popitem()
            self.tokens -= again.tokens
            self._lose(again.attempt)
        self.kept[step.step] = step  # so that the highest is the last
        self.tokens += step.tokens
        if self.attempts and self.attempts[-1].attempt == step.attempt:
            now = self.attempts[-1]
            first = step.step if now.first_step is None else now.first_step
            self.attempts[-1] = replace(now, first_step=first, last_step=step.step)

    def _lose(self, attempt: int) -> None:
        for index, each in enumerate(self.attempts):
            if each.attempt == attempt:
                self.attempts[index] = replace(each, steps_lost=each.steps_lost + 1)
