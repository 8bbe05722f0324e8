"""Which of several sweeps has an evaluator next. Pure.

Each evaluator decides for itself, when a trial ends: a waiting sweep of higher priority goes first,
so it waits for one trial at most; among equals the time that each has had is shared out by weight
(start-time fair queueing: a sweep that comes starts level with the one that has had least, and has
no claim to the past).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

QUANTUM_S = 1.0
"""A sweep keeps an evaluator for so long, as handing it over costs both of them some milliseconds;
not against one of higher priority."""


@dataclass(frozen=True)
class Lease:
    """A sweep's hold on an evaluator. It ends with ``job_id``, the job of its driver in Ray.

    ``weight``: its share of the time beside other sweeps of the same ``priority``.
    """

    sweep_id: str
    job_id: str
    priority: int = 0
    weight: float = 1.0


class Turns:
    """The seconds that each sweep has had, over its weight, and who is next."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def came(self, lease: Lease, others: Iterable[Lease]) -> None:
        """A sweep asks for the evaluator that ``others`` hold or wait for."""
        known = [self._had.get(other.sweep_id, 0.0) for other in others if other != lease]
        level = min(known, default=0.0)
        self._had[lease.sweep_id] = max(self._had.get(lease.sweep_id, 0.0), level)

    def had(self, lease: Lease, seconds: float) -> None:
        """A sweep has had the evaluator for so long."""
        self._had[lease.sweep_id] = self._had.get(lease.sweep_id, 0.0) + seconds / lease.weight

    def went(self, sweep_id: str) -> None:
        """A sweep has ended."""
        self._had.pop(sweep_id, None)

    def next(self, waiting: Iterable[Lease]) -> Lease | None:
        """Who has it next; of equals who came first."""
        return min(
            waiting,
            key=lambda lease: (-lease.priority, self._had.get(lease.sweep_id, 0.0)),
            default=None,
        )

    def yields(self, holder: Lease, waiting: Iterable[Lease], held_s: float) -> bool:
        """Whether the holder lets go after a trial, ``held_s`` seconds after it took hold."""
        other = self.next(waiting)
        if other is None or other.priority != holder.priority:
            return other is not None and other.priority > holder.priority
        had = self._had.get(holder.sweep_id, 0.0) + held_s / holder.weight
        return held_s >= QUANTUM_S and self._had.get(other.sweep_id, 0.0) < had
