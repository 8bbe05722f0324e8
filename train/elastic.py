"""When a run starts, leaves and resizes: pure decisions over what the cluster offers.

Promises: workers are never placed by count on a node whose end is announced or that does not
answer; a generation is left only for a reason that is named, and only after it has saved; a notice
is followed at once, growth only when it has been possible for a while and the generation is not
young. Acting on it is :mod:`ebbtide.train.controller`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH_STABLE_S = 6.0
"""More workers must have been possible for so long: nodes seldom come alone."""

GROWTH_INTERVAL_S = 15.0
"""A generation runs at least this long before it is left for growth."""


@dataclass(frozen=True)
class Limits:
    """How many workers the job wants."""

    fewest: int
    most: int


@dataclass(frozen=True)
class Offer:
    """A node that is reserved for the run, and how many workers fit on it."""

    node_id: str
    workers: int
    draining: bool = False
    reachable: bool = True

    @property
    def usable(self) -> bool:
        return self.reachable and not self.draining


@dataclass(frozen=True)
class Running:
    """The generation at work: the nodes of its ranks, when it began, whether it has left."""

    nodes: Sequence[str]
    began_s: float
    has_left: bool

    @property
    def world_size(self) -> int:
        return len(self.nodes)


def possible_workers(offers: Sequence[Offer], limits: Limits) -> int:
    """How many workers could run now, at most as many as the job wants."""
    return min(limits.most, sum(offer.workers for offer in offers if offer.usable))


def hidden_workers(offers: Sequence[Offer]) -> int:
    """How many workers fit on nodes that must not be used: so many more have to be asked for."""
    return sum(offer.workers for offer in offers if not offer.usable)


def workers_to_start(offers: Sequence[Offer], limits: Limits) -> int | None:
    """The next generation's number of workers; None while there are too few."""
    possible = possible_workers(offers, limits)
    return possible if possible >= limits.fewest else None


def notice(offers: Sequence[Offer], running: Running) -> list[str]:
    """The nodes of the running generation whose end is announced."""
    draining = {offer.node_id for offer in offers if offer.draining}
    return sorted(draining.intersection(running.nodes))


def reason_to_leave(
    offers: Sequence[Offer],
    running: Running,
    limits: Limits,
    now_s: float,
    more_since_s: float | None,
) -> str | None:
    """Why the running generation should save and make way for another, or None.

    ``more_since_s`` is since when more workers have been possible than are running.
    """
    going = notice(offers, running)
    if going:
        return f"notice: {', '.join(node[:8] for node in going)} will be taken away"
    stable = more_since_s is not None and now_s - more_since_s >= GROWTH_STABLE_S
    if stable and now_s - running.began_s >= GROWTH_INTERVAL_S:
        possible = possible_workers(offers, limits)
        return f"growth: {possible} workers are possible, {running.world_size} run"
    return None
