"""What earlier drivers of a sweep heard from its trials, to be heard again in the same order. Pure.

A driver that continues a sweep runs it from the start: the searcher proposes, the scheduler
decides. A trial that was heard before is told from its journal and not run; so both come to the
state in which the earlier driver was killed, rungs included, and propose what it would have. An
unfinished trial runs again, and what was heard of it is skipped. Promises: a trial is recognised
by its values, whatever the order; if order and record do not agree, all that was finished is still
not run again.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.tune.journal import Event
from ebbtide.tune.running import BOOKKEEPING, Memory, TrialFailed

Answer = dict[str, Any] | TrialFailed


@dataclass
class _Trial:
    values: Mapping[str, Any]
    started_at_s: float
    answers: deque[Answer] = field(default_factory=deque)
    taken_over: int = 0
    ended: Event | None = None


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _result(event: Event, iteration: int) -> dict[str, Any]:
    """A ``reported`` event as the evaluator's own result."""
    return {
        **event["metrics"],
        "done": event["finished"],
        "finished": event["finished"],
        "pid": 0,
        "training_iteration": iteration,
        "time_total_s": event["seconds"],
    }


def with_memories(events: Sequence[Event], memories: Sequence[Memory]) -> list[Event]:
    """The journal, completed by what evaluators remember and a killed driver did not write."""
    known: dict[int, Mapping[str, Any]] = {}
    heard: dict[tuple[int, int], int] = defaultdict(int)
    beginnings: dict[int, int] = defaultdict(int)
    for event in events:
        number = event.get("trial", 0)
        if event["event"] in ("started", "took_over"):
            known[number] = event["values"]
        if event["event"] in ("failed", "took_over"):
            beginnings[number] += 1
        elif event["event"] == "reported":
            heard[number, beginnings[number]] += 1
    missing: list[dict[str, Any]] = []
    for memory in sorted(memories, key=lambda memory: (memory.failures, memory.at_s)):
        number = memory.number
        if number not in known:
            known[number] = memory.values
            missing.append(
                {"event": "started", "trial": number, "values": memory.values, "at_s": memory.at_s}
            )
        if memory.failures == beginnings[number] and memory.values != known[number]:
            continue
        written = heard[number, memory.failures] - memory.skipped
        for result in memory.results[max(0, written) :]:
            missing.append(
                {
                    "event": "reported",
                    "trial": number,
                    "metrics": {k: v for k, v in result.items() if k not in BOOKKEEPING},
                    "finished": result["finished"],
                    "seconds": result["time_total_s"],
                    "at_s": memory.at_s + result["time_total_s"],
                }
            )
        if memory.failure is not None and beginnings[number] == memory.failures:
            beginnings[number] += 1
            missing.append({"event": "failed", "trial": number, **memory.failure})
    return [*events, *sorted(missing, key=lambda event: event["at_s"])]


class Past:
    """The record by trial, and the order of what is still to be told."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self._trials: dict[int, _Trial] = {}
        self._order: list[int] = []
        self._told = 0
        self._numbers: dict[str, int] = {}  # of this driver's trials, by their id
        self._ids: dict[int, str] = {}
        self.is_telling = False
        for event in events:
            self._add(event)
        self._unclaimed: dict[str, deque[int]] = defaultdict(deque)
        for number, trial in self._trials.items():
            self._unclaimed[_key(trial.values)].append(number)
        self._next_number = max(self._trials, default=0) + 1

    def _add(self, event: Event) -> None:
        kind = event["event"]
        if kind == "started":
            self._trials.setdefault(event["trial"], _Trial(event["values"], event["at_s"]))
        elif kind in ("reported", "failed"):
            trial = self._trials[event["trial"]]
            since = 0
            for answer in trial.answers:
                since = 0 if isinstance(answer, TrialFailed) else since + 1
            trial.answers.append(
                _result(event, since + 1)
                if kind == "reported"
                else TrialFailed(
                    event["reason"], event["may_retry"], event["details"], event["evicted"]
                )
            )
            self._order.append(event["trial"])
        elif kind == "took_over":
            self._trials[event["trial"]].taken_over += 1
        elif kind == "ended":
            self._trials[event["trial"]].ended = event

    @property
    def num_finished(self) -> int:
        """Trials that will not run again."""
        return sum(trial.ended is not None or _is_final(trial) for trial in self._trials.values())

    def claim(self, trial_id: str, values: Mapping[str, Any]) -> int:
        """The number of a trial that this driver starts, the recorded one if there is one."""
        if trial_id not in self._numbers:
            recorded = self._unclaimed.get(_key(values))
            if recorded:
                self._numbers[trial_id] = recorded.popleft()
            else:
                self._numbers[trial_id] = self._next_number
                self._next_number += 1
            self._ids[self._numbers[trial_id]] = trial_id
        return self._numbers[trial_id]

    def is_recorded(self, number: int) -> bool:
        return number in self._trials

    def started_at_s(self, number: int) -> float:
        return self._trials[number].started_at_s

    def num_taken_over(self, number: int) -> int:
        """How many states of others a trial is known to have gone on from."""
        return self._trials[number].taken_over if number in self._trials else 0

    def ended(self, number: int) -> Event | None:
        """The record of a trial's end."""
        trial = self._trials.get(number)
        return None if trial is None else trial.ended

    def to_skip(self, trial_id: str) -> int:
        """How many results of the try that begins now are told from the record."""
        trial = self._trials.get(self._numbers[trial_id])
        count = 0
        for answer in () if trial is None else trial.answers:
            if isinstance(answer, TrialFailed):
                return 0
            count += 1
        return count

    # What the controller asks; see PooledSweep.

    def has_answer(self, trial_id: str) -> bool:
        """Whether what a trial is asked next is told from the record."""
        trial = self._trials.get(self._numbers[trial_id])
        return trial is not None and bool(trial.answers)

    def answer(self, trial_id: str) -> Answer:
        return self._trials[self._numbers[trial_id]].answers.popleft()

    def is_over(self) -> bool:
        return self._told >= len(self._order)

    def due(self) -> str | None:
        """The trial that is to be told next; None if this driver has not started it."""
        return None if self.is_over() else self._ids.get(self._order[self._told])

    def earliest(self, trial_ids: Collection[str]) -> str | None:
        """Of these trials the one that was heard first; without one the order is given up."""
        by_number = {self._numbers[trial_id]: trial_id for trial_id in trial_ids}
        for number in self._order[self._told :]:
            if number in by_number:
                return by_number[number]
        self._told = len(self._order)
        return next(iter(trial_ids), None)

    @contextlib.contextmanager
    def telling(self, trial_id: str) -> Iterator[None]:
        """While a recorded answer is worked on."""
        if not self.is_over():
            at = self._order.index(self._numbers[trial_id], self._told)
            self._order.insert(self._told, self._order.pop(at))
            self._told += 1
        self.is_telling = True
        try:
            yield
        finally:
            self.is_telling = False


def _is_final(trial: _Trial) -> bool:
    if not trial.answers:
        return False
    last = trial.answers[-1]
    return not last.may_retry if isinstance(last, TrialFailed) else bool(last["finished"])
