"""A market of several zones as one small Markov chain: what ``plan`` decides upon.

Zones on offer are told apart by their grade: how likely they are to take spot away soon, 0 being
the best. Without spot nodes a job sees the market as its best grade on offer, or as none on offer
for some time. On spot nodes it sees the grade of its own zone, which changes with age until the
zone takes the nodes away and the job sees the market again. All transitions are counted: in what
was seen of the zones together (so that zones which fail together are known to), and in a made-up
past of independent zones with the same hazards, which stands in where little was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.platform.market.hazard import (
    Array,
    Series,
    Spells,
    age_class,
    ages_s,
    draw_series,
    unchanged,
)

GRADES = 4
NONE_EDGES_STEPS = np.array([0, 2, 4, 8, 16, 32])
"""Market states 0.. are: no spot on offer for at least so many steps."""
NONE = len(NONE_EDGES_STEPS)
"""The market state of grade g is ``NONE + g``."""
STATES = NONE + GRADES
MADE_UP_TICKS = 20_000
WORTH_HOURS = 27.0
"""How many hours of a real past the made-up past is worth."""

WINNERS_CURSE = 1.5
"""By how much more often than estimated a zone that was chosen among several takes nodes away: the
best of several estimates is more likely too good than too bad."""
HISTORY_HOURS = 200.0
"""How many hours of what is seen now a history is worth at most, however long it is."""

Grades = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chain:
    """Transition probabilities over one step.

    ``market``: from market state to market state. ``grade``: from own grade to own grade, given
    that the zone does not take the nodes away, which it does with ``eviction[grade]``; the market
    is then in a state of ``after[grade]``. ``usd``: price of a grade, dollars an hour a node.
    """

    market: Array
    grade: Array
    eviction: Array
    after: Array
    usd: Array


def grade_table(hazards: Sequence[Array], usd: Array, restart_h: float) -> Grades:
    """The grade of each zone (row) at each age class: equal parts of the logarithm of the hazard
    between the best and the worst that any of the zones has.

    A dearer zone counts as one whose hazard is higher by the evictions an hour that would cost as
    much: an eviction costs about one and a half restarts.
    """
    dearer = (usd / usd.min() - 1.0) / max(1.5 * restart_h, 1e-3)
    level = np.log(np.array([per_hour[1] for per_hour in hazards]) + dearer[:, None])
    low, high = level.min(), level.max()
    part = (level - low) / max(high - low, 1e-9)
    grades: Grades = np.minimum((part * GRADES).astype(np.int64), GRADES - 1)
    return grades


def none_state(steps: Array) -> NDArray[np.int64]:
    """The market state of so many steps without spot on offer."""
    states: NDArray[np.int64] = np.searchsorted(NONE_EDGES_STEPS, steps, side="right") - 1
    return states


class Counts:
    """Transitions counted in pasts, each with a weight; a step has ``ticks``, a zone a price."""

    def __init__(self, ticks: int, usd: Array) -> None:
        self._ticks = ticks
        self._market = np.zeros((STATES, STATES))
        self._grade = np.zeros((GRADES, GRADES))
        self._after = np.zeros((GRADES, STATES))
        self._on = np.zeros((len(usd), GRADES))
        self._usd = usd

    def add(
        self,
        zones: Sequence[Series],
        grades: Grades,
        tick_s: float,
        weight: float,
    ) -> None:
        """Count a past: one series a zone, all of the same ticks."""
        step = self._ticks
        if len(zones[0]) <= step:
            return
        own = np.array(
            [
                np.where(series == 1, table[age_class(ages_s(series, tick_s))], GRADES)
                for series, table in zip(zones, grades, strict=True)
            ]
        )
        best = own.min(axis=0)
        none = (best == GRADES).astype(np.uint8)
        market = np.where(none, none_state(ages_s(none, 1.0) / step), NONE + best)
        now, then = market[:-step], market[step:]
        self._market += weight * _pairs(now, then, STATES, STATES)
        lost = np.zeros((len(zones), len(now)), dtype=bool)
        for tick in range(1, step + 1):
            lost |= own[:, tick : len(now) + tick] == GRADES
        for zone in range(len(zones)):
            on = own[zone, :-step] < GRADES
            self._on[zone] += weight * np.bincount(own[zone, :-step][on], minlength=GRADES)
            kept, gone = on & ~lost[zone], on & lost[zone]
            self._grade += weight * _pairs(
                own[zone, :-step][kept], own[zone, step:][kept], GRADES, GRADES
            )
            self._after += weight * _pairs(own[zone, :-step][gone], then[gone], GRADES, STATES)

    def chain(self) -> Chain:
        """The probabilities; a state that was never seen is never left."""
        on = self._on + 1e-9
        eviction = (self._after.sum(axis=1) + 1e-3) / (on.sum(axis=0) + 1.0)
        if len(self._usd) > 1:
            eviction = np.minimum(WINNERS_CURSE * eviction, 0.9)
        after = self._after + 1e-9 * (np.arange(STATES) == 0)
        return Chain(
            market=_rows(self._market + 1e-6 * np.eye(STATES)),
            grade=_rows(self._grade + 1e-6 * np.eye(GRADES)),
            eviction=eviction,
            after=_rows(after),
            usd=(on * self._usd[:, None]).sum(axis=0) / on.sum(axis=0),
        )


def _pairs(first: Grades, second: Grades, rows: int, columns: int) -> Array:
    counted = np.bincount(first * columns + second, minlength=rows * columns)
    return counted.reshape(rows, columns).astype(np.float64)


def _rows(counts: Array) -> Array:
    shares: Array = counts / counts.sum(axis=1, keepdims=True)
    return shares


def learn(
    history: Sequence[Series],
    now: Sequence[Series],
    usd: Array,
    tick_s: float,
    step_ticks: int,
    restart_h: float,
) -> tuple[Chain, Grades]:
    """The chain and the grades that a history and what is seen now tell: one series a zone each.

    History counts as ``HISTORY_HOURS`` at most, and the less, the less likely it is that the zones
    still behave as they did. ``usd``: one price a zone. The made-up past is always the same for the
    same pasts.
    """
    hours = len(history[0]) * tick_s / 3600
    worth = min(1.0, HISTORY_HOURS / hours) if hours else 0.0
    weights, hazards = [], []
    for before, seen in zip(history, now, strict=True):
        past, present = Spells.of(before, tick_s), Spells.of(seen, tick_s)
        known = Spells(worth * past.hours, worth * past.changes)
        weight = unchanged(known, present)
        weights.append(worth * weight)
        hazards.append((Spells(weight * known.hours, weight * known.changes) + present).per_hour())
    grades = grade_table(hazards, usd, restart_h)
    counts = Counts(step_ticks, usd)
    draw = np.random.default_rng(0)
    made_up = [draw_series(per_hour, tick_s, MADE_UP_TICKS, draw) for per_hour in hazards]
    counts.add(made_up, grades, tick_s, WORTH_HOURS * 3600 / tick_s / MADE_UP_TICKS)
    counts.add(history, grades, tick_s, float(np.mean(weights)))
    counts.add(now, grades, tick_s, 1.0)
    return counts.chain(), grades
