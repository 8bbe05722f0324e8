"""How likely a zone is to take spot away, or to offer it again, by how long it has not.

Spells of spot, and of no spot, are not exponential: the longer one has lasted, the longer it will.
A zone's behaviour is its two hazards (changes an hour) by age of the spell. They are estimated from
the spells seen so far, twice shrunk: the prior's shape is scaled to the zone (gamma-Poisson, so a
zone of which nothing is known has the prior), and each age's hazard is drawn towards that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Series = NDArray[np.uint8]
"""A byte a tick: 1 where spot could be had."""

AGE_EDGES_S = np.array([0, 780, 1560, 3120, 6240, 12480, 24960, 49920], dtype=np.float64)
"""Ages of a spell are told apart in these classes: from each edge to the next, doubling."""

PRIOR_PER_HOUR: Array = np.array(
    [
        [2.33, 1.23, 1.01, 0.57, 0.29, 0.25, 0.17, 0.07],
        [1.74, 1.16, 1.05, 0.51, 0.34, 0.23, 0.13, 0.07],
    ]
)
"""Changes an hour by age, of no spot (row 0) and of spot (row 1): what zones of public traces have
in common. Only a starting point; a zone's own spells soon weigh more."""

PRIOR_CHANGES = 3.0
"""How many changes the prior's level of a zone is worth."""
PRIOR_HOURS = 54.0
"""How many hours at an age the scaled prior's hazard there is worth."""


def ages_s(series: Series, tick_s: float) -> Array:
    """At each tick, for how long the spell of that tick has lasted (0 at its first)."""
    position = np.arange(len(series))
    change = np.ones(len(series), dtype=bool)
    change[1:] = series[1:] != series[:-1]
    age: Array = (position - np.maximum.accumulate(np.where(change, position, 0))) * tick_s
    return age


def age_class(age_s: NDArray[np.floating]) -> NDArray[np.int64]:
    """The class of ``AGE_EDGES_S`` that each age falls into."""
    return np.searchsorted(AGE_EDGES_S, age_s + 1e-6, side="right").astype(np.int64) - 1


@dataclass(frozen=True)
class Spells:
    """Sufficient statistics of a zone's past: hours at each state and age, and changes there."""

    hours: Array
    changes: Array

    @classmethod
    def of(cls, series: Series, tick_s: float) -> Spells:
        """Count a series. What comes after its last tick is not known and not counted."""
        size = len(AGE_EDGES_S)
        if len(series) < 2:
            return cls(np.zeros((2, size)), np.zeros((2, size)))
        key = series[:-1].astype(np.int64) * size + age_class(ages_s(series, tick_s)[:-1])
        changed = series[1:] != series[:-1]
        hours = np.bincount(key, minlength=2 * size) * (tick_s / 3600)
        changes = np.bincount(key[changed], minlength=2 * size)
        return cls(
            hours.reshape(2, size).astype(np.float64), changes.reshape(2, size).astype(np.float64)
        )

    def __add__(self, other: Spells) -> Spells:
        return Spells(self.hours + other.hours, self.changes + other.changes)

    def per_hour(self) -> Array:
        """The estimated hazards, shaped as ``PRIOR_PER_HOUR``."""
        expected = (self.hours * PRIOR_PER_HOUR).sum(axis=1, keepdims=True)
        seen = self.changes.sum(axis=1, keepdims=True)
        prior = PRIOR_PER_HOUR * (seen + PRIOR_CHANGES) / (expected + PRIOR_CHANGES)
        hazards: Array = (self.changes + PRIOR_HOURS * prior) / (self.hours + PRIOR_HOURS)
        return hazards


def unchanged(before: Spells, now: Spells) -> float:
    """How likely it is that a zone still behaves as before, given what is seen of it now.

    Bayes' rule with even odds between two ways to explain how often spells ended: the level that
    ``before`` tells, and a new one of which only the prior is known (both gamma-Poisson).
    """
    odds = 0.0
    for state in (0, 1):
        events, expected = _level(now, state)
        more, longer = _level(before, state)
        fresh = _log_evidence(PRIOR_CHANGES, PRIOR_CHANGES, events, expected)
        odds += (
            _log_evidence(PRIOR_CHANGES + more, PRIOR_CHANGES + longer, events, expected) - fresh
        )
    return 1.0 / (1.0 + math.exp(min(-odds, 700.0)))


def _level(spells: Spells, state: int) -> tuple[float, float]:
    """Changes seen, and those that the prior expects in as long a time."""
    expected = (spells.hours[state] * PRIOR_PER_HOUR[state]).sum()
    return float(spells.changes[state].sum()), float(expected)


def _log_evidence(shape: float, rate: float, events: float, expected: float) -> float:
    return (
        math.lgamma(shape + events)
        - math.lgamma(shape)
        + shape * math.log(rate)
        - (shape + events) * math.log(rate + expected)
    )


def draw_series(per_hour: Array, tick_s: float, ticks: int, draw: np.random.Generator) -> Series:
    """A made-up past of a zone with these hazards; begins with a new spell of spot."""
    longest = int(200 * 3600 / tick_s) + 1
    hazard = per_hour[:, age_class(np.arange(longest, dtype=np.float64) * tick_s)] * (tick_s / 3600)
    lasted = np.cumsum(np.maximum(hazard, 1e-9), axis=1)
    parts: list[Series] = []
    total = 0
    while total < ticks:
        limits = draw.exponential(size=(256, 2))
        up = 1 + np.searchsorted(lasted[1], limits[:, 1])
        down = 1 + np.searchsorted(lasted[0], limits[:, 0])
        lengths = np.stack([up, down], axis=1).ravel()
        parts.append(np.repeat(np.tile(np.array([1, 0], dtype=np.uint8), len(up)), lengths))
        total += int(lengths.sum())
    return np.concatenate(parts)[:ticks]
