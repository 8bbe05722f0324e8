"""Which rank holds the others up: a pure rule over how long each rank worked in every step.

A rank works when it computes or reads data, not when it waits for others. One that has worked more
than 1.5 times as long as the median rank, in 20 steps on end, is a straggler.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

RATIO = 1.5
STEPS = 20


class StragglerWatch:
    """Takes the ranks' working seconds of each step, and names each straggler once."""

    def __init__(self) -> None:
        self._ratios: dict[int, list[float]] = {}

    def add(self, busy_s: Sequence[float]) -> list[tuple[int, float]]:
        """Ranks that have become stragglers with this step, and how many times the median."""
        middle_s = statistics.median_low(busy_s)
        found = []
        for rank, seconds in enumerate(busy_s):
            ratio = seconds / middle_s if middle_s > 0 else 1.0
            ratios = self._ratios.setdefault(rank, [])
            if ratio <= RATIO:
                ratios.clear()
                continue
            ratios.append(ratio)
            if len(ratios) == STEPS:
                found.append((rank, statistics.median(ratios)))
        return found
