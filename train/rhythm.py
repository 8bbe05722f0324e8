"""When a run saves: by steps, by the clock, or by what saves and evictions cost. Pure.

Rank 0 decides and the others are told with the step (:class:`ebbtide.train.step.StepResult`), so
that all ranks save after the same step; nothing that is computed depends on it. Promises: a save
never falls due more often than saves can be stored; one that falls due while another is being
stored is begun as soon as that one is done, and if the next falls due before, it is left out and
counted.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from ebbtide.train.config import CheckpointConfig

logger = logging.getLogger(__name__)

LEAST_S, MOST_S = 10.0, 3600.0
"""Between two saves, with ``every: auto``."""

_PRIOR_S = 3600.0
"""Before anything is known, one interruption an hour is expected; it counts as one observation."""

PATIENCE_S = 5.0
_WAITING = 0.02

_RECENT = 5
_TOLD_CHANGE = 1.2


@dataclass(frozen=True)
class Interruptions:
    """How often generations of the run were ended from outside: evicted, killed, or failed."""

    count: int = 0
    observed_s: float = 0.0

    def mean_s(self, further_s: float = 0.0) -> float:
        """Mean time between two of them, after ``further_s`` more without one."""
        return (_PRIOR_S + self.observed_s + further_s) / (1 + self.count)


NO_INTERRUPTIONS = Interruptions()


def young_daly_s(cost_s: float, between_s: float) -> float:
    """The time between saves at which saving and lost work together cost least.

    sqrt(2 x cost x mean time between interruptions), the first-order optimum of Young (1974) and
    Daly (2006).
    """
    return math.sqrt(2 * cost_s * between_s)


def automatic_s(cost_s: float | None, took_s: float, between_s: float) -> float:
    """:func:`young_daly_s` within bounds; the least while no cost is known yet.

    Never less than ``took_s``, the time that storing one takes in the background.
    """
    best_s = LEAST_S if cost_s is None else young_daly_s(cost_s, between_s)
    return min(max(best_s, LEAST_S, took_s), max(MOST_S, took_s))


class Patience:
    """How long the training loop may wait for a save, so that the next one need not be left out.

    Some seconds at once, which are regained as a small share of the time: what storage is too slow
    for in the long run costs no more than that share, and a save that hangs no more than once.
    """

    def __init__(self, now_s: float) -> None:
        self._left_s, self._at_s = PATIENCE_S, now_s

    def left_s(self, now_s: float) -> float:
        """The seconds that may be waited at this moment."""
        return min(PATIENCE_S, self._left_s + _WAITING * (now_s - self._at_s))

    def spend(self, waited_s: float, now_s: float) -> None:
        """So much was waited, until now."""
        self._left_s, self._at_s = max(0.0, self.left_s(now_s) - waited_s), now_s

    def allows(self, now_s: float, done_s: float) -> bool:
        """Whether to wait for what is expected to be done then; it hangs if that is past."""
        return now_s < done_s <= now_s + self.left_s(now_s)


class Rhythm:
    """When the saves of one generation fall due. Times are of one monotonic clock.

    ``is_owed``: there is work already that is in no checkpoint, so that the first is due at once if
    saves go by the clock. ``ended`` may be called in another thread than the rest.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        interruptions: Interruptions,
        now_s: float,
        *,
        is_owed: bool = False,
    ) -> None:
        self._every, self._every_s = config.every, config.every_s
        self._interruptions = interruptions
        self._began_s = self._asked_s = now_s
        self._last_s = -math.inf if is_owed else now_s
        self._waiting: int | None = None
        self._costs_s: tuple[float, ...] = ()
        self._took_s = 0.0
        self._told_s: float | None = None

    @property
    def is_counted(self) -> bool:
        """Whether saves fall due after so many steps, not after a time."""
        return isinstance(self._every, int)

    def done_s(self, began_s: float) -> float:
        """When a save that was begun then is done, going by the last one, with a margin."""
        return began_s + (max(1.0, 2 * self._took_s) if self._costs_s else PATIENCE_S)

    @property
    def cost_s(self) -> float | None:
        """What one of the newest saves has cost the run; None before the first."""
        costs_s = self._costs_s
        return sum(costs_s) / len(costs_s) if costs_s else None

    def interval_s(self, now_s: float) -> float | None:
        """The time between two saves; None if it is counted in steps."""
        if self._every_s is not None or self._every != "auto":
            return self._every_s
        between_s = self._interruptions.mean_s(now_s - self._began_s)
        return automatic_s(self.cost_s, self._took_s, between_s)

    def ask(self, step: int, now_s: float, *, is_busy: bool) -> tuple[bool, int | None]:
        """Whether to save after ``step``, which is about to be made, and a step left out.

        ``is_busy``: the save before is still being stored. Asked before every step.
        """
        is_due = self._falls_due(step, now_s)
        self._asked_s = now_s
        left_out = self._waiting if is_due else None
        if is_due:
            self._waiting, self._last_s = step, now_s
        return self._waiting is not None and not is_busy, left_out

    def began(self, now_s: float) -> None:
        """A save was begun."""
        self._last_s, self._waiting = now_s, None

    def ended(self, cost_s: float, took_s: float, now_s: float) -> None:
        """A save was committed ``took_s`` after its begin; it has cost the run ``cost_s``."""
        self._costs_s = (*self._costs_s, cost_s)[-_RECENT:]
        self._took_s = took_s
        interval_s = self.interval_s(now_s)
        if self._every == "auto" and interval_s is not None and self._is_news(interval_s):
            self._told_s = interval_s
            logger.info(
                "a save every %.0f s from now on: one costs %.2f s, and the run is interrupted "
                "every %.0f s or so",
                interval_s,
                self.cost_s,
                self._interruptions.mean_s(now_s - self._began_s),
            )

    def _falls_due(self, step: int, now_s: float) -> bool:
        interval_s = self.interval_s(now_s)
        if interval_s is None:
            assert isinstance(self._every, int)
            return step % self._every == 0
        step_s = now_s - self._asked_s  # the nearest end of a step, not the first one after
        return now_s - self._last_s + 1.5 * step_s >= interval_s

    def _is_news(self, interval_s: float) -> bool:
        told_s = self._told_s
        return told_s is None or max(interval_s / told_s, told_s / interval_s) >= _TOLD_CHANGE
