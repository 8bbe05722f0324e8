"""How a run's node time divides: from the ledger's records to whole microseconds per owner.

Pure. Promises: for any records, in any order, with duplicates, overlaps and gaps, the parts sum to
the node time exactly, and do not depend on the order. The rules, in short (``docs/costs.md`` has
their reasons):

- A node's time runs from ``node_up`` to ``node_down``; without that to the driver's ``finished``,
  else to the last sign of life before the next driver started, else to now while the run lives.
- Where spans of several processes on one node overlap, they share the time equally.
- Work in steps that a later attempt did again is lost work.
- Time that no span covers is idle while an attempt computes (and after the last one), and restart
  before its first compute.

Microseconds are what a double of epoch seconds can hold.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import (
    Attempt,
    Epoch,
    Finished,
    NodeDown,
    NodeUp,
    Record,
    Span,
    Started,
)

SILENCE_S = 60.0
"""Without a record for so long (writers flush every 10 s at the latest) a run is taken for dead."""

_NEVER_LOST = (Owner.RESTART, Owner.IDLE)


def microseconds(time_s: float) -> int:
    """Seconds as whole microseconds."""
    return round(time_s * 1_000_000)


@dataclass(frozen=True)
class Stay:
    """A stretch of a node's time on one set of terms."""

    start_us: int
    end_us: int
    terms: NodeUp


@dataclass(frozen=True)
class Share:
    """What a piece of node time was for; ``attempt`` is None before there was any.

    ``epoch`` is the pass over the data whose steps it led to, None if the ledger does not say.
    """

    terms: NodeUp
    attempt: int | None
    owner: Owner
    epoch: int | None = None


def newest_s(records: Iterable[Record]) -> float:
    """The time of the newest record; 0 without any."""
    return max((_time_s(record) for record in records), default=0.0)


def _time_s(record: Record) -> float:
    match record:
        case Span():
            return record.end_s
        case Attempt() | Epoch():
            return record.start_s
        case _:
            return record.time_s


class _OpenEnds:
    """Where the stay of a node ends, if nothing says that it went down."""

    def __init__(self, records: Iterable[Record], now_us: int) -> None:
        self._started: list[int] = []  # a driver's life begins
        self._finished: list[int] = []
        times = []
        for record in records:
            times.append(time_us := microseconds(_time_s(record)))
            if isinstance(record, Started):
                self._started.append(time_us)
            elif isinstance(record, Finished):
                self._finished.append(time_us)
        self._started.sort()
        self._finished.sort()
        self._newest: dict[int, int] = {}  # by how many drivers had started
        for time_us in times:
            life = bisect_right(self._started, time_us)
            self._newest[life] = max(time_us, self._newest.get(life, time_us))
        last = len(self._started)
        if now_us - self._newest.get(last, now_us) <= SILENCE_S * 1_000_000:
            self._newest[last] = max(now_us, self._newest.get(last, now_us))

    def after(self, up_us: int) -> int:
        """For a node that came up at ``up_us``, which is the time of one of the records."""
        life = bisect_right(self._started, up_us)
        finished = bisect_left(self._finished, up_us)
        if finished < len(self._finished):
            finished_us = self._finished[finished]
            if life == len(self._started) or finished_us < self._started[life]:
                return finished_us
        return self._newest[life]


def stays(records: Sequence[Record], now_s: float) -> list[Stay]:
    """Every node's stretches of time, without overlap per node."""
    ups: dict[str, set[NodeUp]] = defaultdict(set)
    downs: dict[str, set[int]] = defaultdict(set)
    spans: dict[str, list[Span]] = defaultdict(list)
    for record in records:
        match record:
            case NodeUp():
                ups[record.node_id].add(record)
            case NodeDown():
                downs[record.node_id].add(microseconds(record.time_s))
            case Span():
                spans[record.node_id].append(record)
    ends = _OpenEnds(records, microseconds(now_s))
    found = []
    for node_id in sorted(ups):
        ordered = sorted(ups[node_id], key=lambda up: (up.time_s, up.model_dump_json()))
        times = [microseconds(up.time_s) for up in ordered]
        for index, (start_us, up) in enumerate(zip(times, ordered, strict=True)):
            gone = (down for down in downs[node_id] if down >= start_us)
            end_us = min([ends.after(start_us), *times[index + 1 : index + 2], *gone])
            found.append(Stay(start_us, end_us, up))
    for node_id in sorted(spans.keys() - ups.keys()):  # its node_up was lost with the driver
        start_s = min(span.start_s for span in spans[node_id])
        terms = NodeUp(
            node_id=node_id,
            time_s=start_s,
            instance_type=None,
            market=Market.ON_DEMAND,
            usd_per_hour=None,
            usd_per_hour_on_demand=None,
        )
        end_us = max(microseconds(span.end_s) for span in spans[node_id])
        found.append(Stay(microseconds(start_s), end_us, terms))
    return [stay for stay in found if stay.end_us > stay.start_us]


class _Window(NamedTuple):
    """A span in microseconds, after the rule of lost work; ``parts`` sum to ``whole_us``."""

    start_us: int
    end_us: int
    attempt: int
    whole_us: int
    parts: tuple[tuple[Owner, int], ...]

    def divide(self, time_us: int) -> Iterator[tuple[Owner, int]]:
        """``time_us`` in the proportions of the parts, without losing a microsecond."""
        seen_us, given_us = 0, 0
        for owner, part_us in self.parts:
            seen_us += part_us
            until_us = time_us * seen_us // self.whole_us
            yield owner, until_us - given_us
            given_us = until_us


def _window(span: Span, repeated_after: float) -> _Window:
    """``repeated_after``: steps beyond this one were done again by a later attempt."""
    start_us, end_us = microseconds(span.start_s), microseconds(span.end_s)
    parts = {owner: microseconds(seconds) for owner, seconds in span.seconds.items()}
    whole_us = sum(parts.values())
    if end_us - start_us > whole_us:
        parts[Owner.IDLE] = parts.get(Owner.IDLE, 0) + end_us - start_us - whole_us
        whole_us = end_us - start_us
    first, last = span.first_step, span.last_step
    if first is not None and last is not None and last > repeated_after:
        steps = last - first + 1
        lost = int(min(steps, last - repeated_after))
        for owner in [owner for owner in parts if owner not in _NEVER_LOST]:
            lost_us = parts[owner] * lost // steps
            parts[owner] -= lost_us
            parts[Owner.LOST_WORK] = parts.get(Owner.LOST_WORK, 0) + lost_us
    return _Window(start_us, end_us, span.attempt, whole_us, tuple(sorted(parts.items())))


def _repeated_after(records: Iterable[Record]) -> dict[int, float]:
    """For every attempt: the last step of it that no later attempt did again."""
    first_steps: dict[int, int] = {}
    numbers = set()
    for record in records:
        if isinstance(record, Attempt):
            first = first_steps.get(record.index, record.first_step)
            first_steps[record.index] = min(first, record.first_step)
            numbers.add(record.index)
        elif isinstance(record, Span):
            numbers.add(record.attempt)
    kept: dict[int, float] = {}
    limit = math.inf
    for number in sorted(numbers, reverse=True):
        kept[number] = limit
        limit = min(limit, first_steps.get(number, math.inf))
    return kept


@dataclass(frozen=True)
class _Phases:
    """Who owns uncovered time from each of ``starts_us`` on (the first is before all time)."""

    starts_us: list[float]
    owners: list[tuple[int | None, Owner]]

    def at(self, time_us: int) -> tuple[int | None, Owner]:
        return self.owners[bisect_right(self.starts_us, time_us) - 1]


def _phases(records: Iterable[Record]) -> _Phases:
    started: dict[int, int] = {}
    first_compute: dict[int, int] = {}
    last_end: dict[int, int] = {}
    for record in records:
        if not isinstance(record, Attempt | Span):
            continue
        start_us = microseconds(record.start_s)
        number = record.index if isinstance(record, Attempt) else record.attempt
        started[number] = min(start_us, started.get(number, start_us))
        if isinstance(record, Span) and record.seconds.keys() != {Owner.RESTART}:
            end_us = microseconds(record.end_s)
            last_end[number] = max(end_us, last_end.get(number, end_us))
            if record.seconds.get(Owner.COMPUTE):
                first_compute[number] = min(start_us, first_compute.get(number, start_us))
    computing = sorted((start_us, number) for number, start_us in first_compute.items())
    if not computing:
        return _Phases([-math.inf], [(max(started, default=None), Owner.RESTART)])
    starts: list[float] = [-math.inf]
    owners: list[tuple[int | None, Owner]] = [(computing[0][1], Owner.RESTART)]
    end_us = 0
    for index, (start_us, number) in enumerate(computing):
        starts.append(start_us)
        owners.append((number, Owner.IDLE))
        end_us = max(end_us, last_end[number])
        if index + 1 < len(computing) and end_us < computing[index + 1][0]:
            starts.append(end_us)
            owners.append((computing[index + 1][1], Owner.RESTART))
    pending = [n for n, t in started.items() if n not in first_compute and t > computing[-1][0]]
    if pending:
        starts.append(end_us)
        owners.append((max(pending), Owner.RESTART))
    return _Phases(starts, owners)


@dataclass(frozen=True)
class _Epochs:
    """Which epoch a time belongs to; what comes before the first one belongs to it, too."""

    starts_us: list[int]
    indexes: list[int]

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Epochs:
        found = {(microseconds(r.start_s), r.index) for r in records if isinstance(r, Epoch)}
        return cls([start_us for start_us, _ in sorted(found)], [i for _, i in sorted(found)])

    def at(self, time_us: int) -> int | None:
        if not self.indexes:
            return None
        return self.indexes[max(0, bisect_right(self.starts_us, time_us) - 1)]


_Part = tuple[int | None, Owner, int | None]
"""Attempt, owner and epoch."""


def _divide_stay(
    stay: Stay, windows: Sequence[_Window], phases: _Phases, epochs: _Epochs
) -> Counter[_Part]:
    """Microseconds of the parts of one stay; ``windows`` are sorted, of its node."""
    windows = [w for w in windows if w.start_us < stay.end_us and w.end_us > stay.start_us]
    cuts = {stay.start_us, stay.end_us}
    cuts.update(t for w in windows for t in (w.start_us, w.end_us))
    cuts.update(int(t) for t in phases.starts_us[1:])
    cuts.update(epochs.starts_us)
    parts: Counter[_Part] = Counter()
    allotted_us: Counter[tuple[int, int | None]] = Counter()
    active: list[int] = []
    opened = 0
    for start_us, end_us in pairwise(sorted(t for t in cuts if stay.start_us <= t <= stay.end_us)):
        while opened < len(windows) and windows[opened].start_us <= start_us:
            active.append(opened)
            opened += 1
        active = [index for index in active if windows[index].end_us > start_us]
        epoch = epochs.at(start_us)
        if not active:
            parts[*phases.at(start_us), epoch] += end_us - start_us
            continue
        each_us, rest_us = divmod(end_us - start_us, len(active))
        for place, index in enumerate(active):
            allotted_us[index, epoch] += each_us + (place < rest_us)
    for (index, epoch), time_us in allotted_us.items():
        for owner, part_us in windows[index].divide(time_us):
            parts[windows[index].attempt, owner, epoch] += part_us
    return parts


def divide(records: Sequence[Record], now_s: float) -> dict[Share, int]:
    """Microseconds of node time by what they were for."""
    repeated = _repeated_after(records)
    windows: dict[str, set[_Window]] = defaultdict(set)
    for record in records:
        if isinstance(record, Span) and record.end_s > record.start_s:
            windows[record.node_id].add(_window(record, repeated[record.attempt]))
    ordered = {node_id: sorted(found) for node_id, found in windows.items()}
    phases, epochs = _phases(records), _Epochs.of(records)
    shares: Counter[Share] = Counter()
    for stay in stays(records, now_s):
        parts = _divide_stay(stay, ordered.get(stay.terms.node_id, ()), phases, epochs)
        for (attempt, owner, epoch), part_us in parts.items():
            if part_us:
                shares[Share(stay.terms, attempt, owner, epoch)] += part_us
    return dict(shares)
