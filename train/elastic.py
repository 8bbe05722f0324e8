"""When a run starts, leaves and resizes: pure decisions over what the cluster offers.

Promises: workers are never placed on a node whose end is announced or that does not answer; a
restart stays on the nodes that have the run's copies in memory, and a new node is taken only when
its processes are warm; a generation is left only for a reason that is named, and only if there is
time to save; notices that come within a few seconds make one restart; growth is taken only when no
more is to be waited for, the generation is not young, and the steps gained outweigh the pause.
Acting on it is :mod:`ebbtide.train.controller`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

NOTICE_WINDOW_S = 5.0
"""So long the run goes on after a notice, for others to come: clouds are asked every 5 s."""

SAVE_UNKNOWN_S = 2.0
"""What a save is taken to last before the run has made one."""

GROWTH_STABLE_S = 6.0
"""More workers, but not yet all, must have been possible for so long: nodes seldom come alone."""

GROWTH_INTERVAL_S = 15.0
"""A generation runs at least this long before it is left for growth."""

WARM_PATIENCE_S = 60.0
"""A node that has not become warm in so long is taken as it is."""

GROWTH_GAIN = 1.05
"""So many times the steps must be expected with more workers, the pause counted in."""

PAUSE_UNKNOWN_S = 10.0
"""What a restart is taken to last before the run has made one."""

STAY_PRIOR_S = 1800.0
"""A run is taken to lose a worker after so long, until it has lost some."""


@dataclass(frozen=True)
class Limits:
    """How many workers the job wants, and what it has to do."""

    fewest: int
    most: int
    micro_batches: int = 1
    steps: int = 1


@dataclass(frozen=True)
class Offer:
    """A node that is reserved for the run, and how many workers fit on it.

    ``warm``: it has prepared processes of the run, or has had them to prepare for long. ``wanted``:
    it is where the market wants the run, if the job has one.
    """

    node_id: str
    workers: int
    draining: bool = False
    reachable: bool = True
    deadline_s: float | None = None
    warm: bool = False
    wanted: bool = True

    @property
    def usable(self) -> bool:
        return self.reachable and not self.draining


@dataclass(frozen=True)
class Running:
    """The generation at work: the nodes of its ranks, when it began, whether it has left.

    ``step`` steps are finished; ``step_s``, ``save_s`` and ``pause_s`` are how long a step, a save
    and a restart take, None before there was one; ``losses`` is how often the run lost workers in
    the ``age_s`` seconds since its driver started.
    """

    nodes: Sequence[str]
    began_s: float
    has_left: bool
    step: int = 0
    step_s: float | None = None
    save_s: float | None = None
    pause_s: float | None = None
    losses: int = 0
    age_s: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.nodes)


def possible_workers(offers: Sequence[Offer], limits: Limits) -> int:
    """How many workers could run now, at most as many as the job wants."""
    return min(limits.most, sum(offer.workers for offer in offers if offer.usable))


def hidden_workers(offers: Sequence[Offer]) -> int:
    """How many workers fit on nodes that must not be used: so many more have to be asked for."""
    return sum(offer.workers for offer in offers if not offer.usable)


def ready_offers(offers: Sequence[Offer], before: Collection[str]) -> list[Offer]:
    """Those that ranks start on in seconds: it had ranks ``before``, or it is warm."""
    return [offer for offer in offers if offer.warm or offer.node_id in before]


@dataclass(frozen=True)
class Wish:
    """Where the market wants the run: on nodes with these labels; None: nowhere, for now."""

    labels: Mapping[str, str] | None
    reason: str

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is one of those."""
        return self.labels is not None and self.labels.items() <= labels.items()


def offers_of_market(offers: Sequence[Offer], limits: Limits) -> Sequence[Offer]:
    """What a start may use: nodes where the market wants them, or all while those are too few."""
    wanted = [offer for offer in offers if offer.wanted]
    return offers if workers_to_start(wanted, limits) is None else wanted


def move_is_due(
    offers: Sequence[Offer], running: Running, limits: Limits, now_s: float, since_s: float
) -> bool:
    """Whether to leave for the nodes where the market wants the run.

    They are enough to start with, have been as many since ``since_s`` (nodes seldom come alone),
    and are warm. Nodes where the market does not want the run cost more by the minute, so nothing
    else is waited for.
    """
    wanted = [offer for offer in offers if offer.wanted]
    possible = workers_to_start(wanted, limits)
    ready = workers_to_start(ready_offers(wanted, running.nodes), limits)
    return possible is not None and ready == possible and now_s - since_s >= GROWTH_STABLE_S


def offers_to_start(
    offers: Sequence[Offer], before: Collection[str], limits: Limits
) -> Sequence[Offer]:
    """What a restart may use: what is ready or, if that is too little, everything."""
    ready = ready_offers(offers, before)
    return offers if workers_to_start(ready, limits) is None else ready


def place(offers: Sequence[Offer], before: Collection[str], workers: int) -> list[str]:
    """A node for each of so many workers: those that had ranks ``before``, then warm ones, then
    others. No more nodes than are needed; none if they do not have the room.
    """
    chosen: list[str] = []
    usable = [offer for offer in offers if offer.usable]
    for offer in sorted(usable, key=lambda o: (o.node_id not in before, not o.warm, o.node_id)):
        chosen += [offer.node_id] * min(offer.workers, workers - len(chosen))
    return chosen if len(chosen) == workers else []


def workers_to_start(offers: Sequence[Offer], limits: Limits) -> int | None:
    """The next generation's number of workers; None while there are too few."""
    possible = possible_workers(offers, limits)
    return possible if possible >= limits.fewest else None


def noticed(offers: Sequence[Offer], running: Running) -> dict[str, float | None]:
    """The nodes of the running generation whose end is announced, and when it is to come."""
    return {
        offer.node_id: offer.deadline_s
        for offer in sorted(offers, key=lambda each: each.node_id)
        if offer.draining and offer.node_id in running.nodes
    }


def too_late(going: Mapping[str, float | None], running: Running, now_s: float) -> list[str]:
    """Those of the noticed nodes that will be gone before a save could be complete."""
    save_s = SAVE_UNKNOWN_S if running.save_s is None else running.save_s
    need_s = save_s + (running.step_s or 0.0)  # a save waits for the step at work
    return [node for node, end_s in going.items() if end_s is not None and end_s - now_s < need_s]


def notice_is_due(
    going: Mapping[str, float | None], running: Running, now_s: float, first_seen_s: float
) -> bool:
    """Whether to save and leave for these nodes now, or to wait for other notices.

    ``first_seen_s`` is when the first of them was seen. The run makes steps meanwhile; it does not
    wait where the nearest deadline leaves no room for it.
    """
    if now_s - first_seen_s >= NOTICE_WINDOW_S:
        return True
    ends_s = [end_s for end_s in going.values() if end_s is not None]
    if len(ends_s) < len(going):
        return True  # nobody knows how long there is
    save_s = SAVE_UNKNOWN_S if running.save_s is None else running.save_s
    room_s = NOTICE_WINDOW_S + 2 * (save_s + (running.step_s or 0.0))
    return min(ends_s) - first_seen_s < room_s


def growth_gain(running: Running, possible: int, limits: Limits) -> float:
    """Steps with ``possible`` workers over steps without, in the time the run may stay as it is.

    A step takes as many rounds as a worker has micro-batches. The stay is how long the run has gone
    on average without losing a worker (a prior of half an hour counts as one loss), and no longer
    than what is left of the run; the pause of the restart is taken off. Infinite while no step has
    been timed.
    """
    if running.step_s is None:
        return math.inf
    rounds = [-(-limits.micro_batches // workers) for workers in (running.world_size, possible)]
    left_s = (limits.steps - running.step) * running.step_s
    stay_s = min((running.age_s + STAY_PRIOR_S) / (running.losses + 1), left_s)
    pause_s = PAUSE_UNKNOWN_S if running.pause_s is None else running.pause_s
    return max(0.0, 1 - pause_s / max(stay_s, 1e-9)) * rounds[0] / rounds[1]


def growth_is_due(
    running: Running, now_s: float, more_since_s: float | None, *, is_most: bool
) -> bool:
    """Whether to wait no longer for further workers, and the generation is not young.

    ``more_since_s`` is since when more workers have been possible than are running; ``is_most``:
    they are all that the job wants.
    """
    stable = more_since_s is not None and (is_most or now_s - more_since_s >= GROWTH_STABLE_S)
    return stable and now_s - running.began_s >= GROWTH_INTERVAL_S
