"""What a policy is asked and answers: the one interface of simulator, tests and live controller.

A policy is a pure function of what has been seen so far: ``decide(memory, seen)`` returns the nodes
that should run now and the memory for the next call. A memory is an immutable value, so the past
can only be what was passed in, and a decision can be repeated. Units: seconds, dollars an hour of
one node. A job needs ``nodes`` nodes at once (a gang) in one market and zone, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ebbtide.platform.prices import Market


@dataclass(frozen=True)
class Terms:
    """What does not change while a job runs.

    ``work_s`` seconds of progress are needed within ``deadline_s`` of the start. A placement that
    starts is paid for ``restart_s`` seconds before it makes progress. ``zones`` name the spot zones
    that may be used; ``history`` is what was seen of them before the start (nodes per tick, one row
    a zone), which may be nothing.
    """

    work_s: float
    deadline_s: float
    restart_s: float
    tick_s: float
    zones: tuple[str, ...]
    nodes: int = 1
    history: tuple[bytes, ...] = ()
    """For each zone a byte a tick: 1 where all the nodes of the job could be had."""


class Placement(NamedTuple):
    """Nodes wanted: how many, bought how, and in which zone (an index into ``Terms.zones``; only
    spot has zones)."""

    nodes: int
    market: Market | None = None
    zone: int | None = None


IDLE = Placement(0)


class Seen(NamedTuple):
    """What is known at a tick. ``running`` is what runs now, evictions of this tick already taken
    off; it makes progress once ``starting_s`` more seconds have passed. ``spot_nodes`` are those
    one could hold in each zone, those that run included."""

    elapsed_s: float
    work_left_s: float
    running: Placement
    starting_s: float
    spot_nodes: tuple[int, ...]
    spot_usd: tuple[float, ...]
    on_demand_usd: float
    on_prem_nodes: int = 0
    evicted: bool = False
    """Whether what ran in the last tick was taken away before this one."""


class Policy(Protocol):
    """``name`` is what the command line calls it. Memories are opaque values of the policy."""

    @property
    def name(self) -> str: ...

    def start(self, terms: Terms) -> Any:
        """The memory at the job's start."""
        ...

    def decide(self, memory: Any, seen: Seen) -> tuple[Placement, Any]:
        """What should run in this tick, and the memory for the next. Called once a tick."""
        ...


def latest_start(terms: Terms, seen: Seen, wanted: Placement) -> bool:
    """Whether on-demand must run in this tick, so that the deadline is still met at worst.

    True where doing ``wanted`` for one tick and then losing everything would leave less time than
    an on-demand start and the remaining work take. The worst case counts the progress that
    ``wanted`` itself makes only where it does so for sure: what runs already and is not starting.
    """
    if wanted.market is Market.ON_DEMAND:
        return False
    tick_s, left_s = terms.tick_s, seen.work_left_s
    if wanted.nodes and wanted == seen.running:
        left_s -= max(0.0, tick_s - seen.starting_s)
    return terms.deadline_s - seen.elapsed_s - tick_s < left_s + terms.restart_s - EPSILON_S


EPSILON_S = 1e-6
"""Seconds below which two times are the same: sums of ticks are not exact."""


def guarded(terms: Terms, seen: Seen, wanted: Placement) -> Placement:
    """``wanted``, or on-demand where that is the last chance to meet the deadline.

    Keeps on-demand that runs and is still needed; never misses a deadline that an on-demand start
    at the job's beginning could have met.
    """
    if latest_start(terms, seen, wanted):
        return Placement(terms.nodes, Market.ON_DEMAND)
    return wanted
