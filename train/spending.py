"""Keeps a run within its budget: follows what happens, and says when it has to leave.

Pure: it is told what happened and what the books say, and answers with what to do. The driver acts.
A stop takes the way of every other leave: the ranks save after the step at work and say so; then,
or when no ranks are at work, the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction

from ebbtide.platform import budget
from ebbtide.platform.account import Account, usd_text
from ebbtide.platform.budget import Books, BudgetConfig, Caution
from ebbtide.train.elastic import Running
from ebbtide.train.events import Checkpoint, Event, Failed, GenerationBegan, Left, Step
from ebbtide.train.pace import Pace

START_S = 10.0
"""What a start is taken to last: a run that cannot pay for one is not started again."""

_PATIENCE_S = 60.0
"""So much longer than expected may ranks take to save and leave; then the run ends without."""


@dataclass(frozen=True)
class Before:
    """What earlier drivers of the run have spent, and when the first one started (epoch s).

    ``usd_per_hour`` is what the nodes of its last attempt cost.
    """

    started_s: float
    usd: Decimal = Decimal(0)
    usd_per_hour: Decimal = Decimal(0)
    by_epoch: Mapping[int | None, Decimal] = field(default_factory=dict)
    partial: bool = False


def before(account: Account, started_s: float) -> Before:
    """From the run's ledger, as it is when a driver starts."""
    last = max((row.attempt or 0 for row in account.rows), default=0)
    nodes = {row.node.node_id: row.node for row in account.rows if (row.attempt or 0) == last}
    rate = sum((node.usd_per_hour or Decimal(0) for node in nodes.values()), Decimal(0))
    return Before(
        started_s,
        (account.total.spent.usd or Decimal(0)) + account.egress_usd,
        rate,
        {epoch: total.spent.usd or Decimal(0) for epoch, total in account.by_epoch.items()},
        account.total.spent.partial,
    )


@dataclass(frozen=True)
class Act:
    """What the driver has to do: say ``cautions``; have attempt ``leave`` save and leave for
    ``reason``; end the run for it (``end``); ``hold`` the run, or let it go on (None: neither)."""

    cautions: tuple[Caution, ...] = ()
    reason: str | None = None
    leave: int | None = None
    end: bool = False
    hold: bool | None = None


class Guard:
    """Of one driver, which starts after ``first_step`` finished steps."""

    def __init__(
        self,
        limits: BudgetConfig,
        steps: int,
        started_s: float,
        before: Before,
        first_step: int,
        steps_per_epoch: Fraction,
    ) -> None:
        self._limits, self._steps, self._before = limits, steps, before
        self._first_step, self._steps_per_epoch = first_step, steps_per_epoch
        self._pace = Pace(started_s)
        self._attempt: int | None = None  # at work
        self._epoch = int(first_step // steps_per_epoch)
        self.saved_step = first_step
        self._by_epoch = dict(before.by_epoch)
        self._booked_usd = Decimal(0)  # of this driver, to an epoch
        self._losses: deque[float] = deque(maxlen=budget.SPIKE_STEPS + 1)
        self._spike: str | None = None
        self._told: set[str] = set()
        self._paused = False
        self._stop: tuple[str, float] | None = None  # why, and until when there is patience

    def follow(self, events: Iterable[Event], usd: Callable[[float], Decimal]) -> None:
        """Take events into account. ``usd``: what this driver had cost at a time (epoch s)."""
        for event in events:
            self._pace.add(event)
            match event:
                case GenerationBegan():
                    self._attempt = event.attempt
                case Left():
                    self._attempt, self.saved_step = None, event.step
                case Failed():
                    self._attempt = None
                case Checkpoint():
                    self.saved_step = event.step
                case Step():
                    self._step(event, usd(event.time_s))
                case _:
                    pass

    def _step(self, step: Step, usd: Decimal) -> None:
        self._epoch = step.epoch
        self._by_epoch[step.epoch] = self._by_epoch.get(step.epoch, Decimal(0)) + (
            usd - self._booked_usd
        )
        self._booked_usd = usd
        self._losses.append(step.loss)
        self._spike = self._spike or budget.spike(list(self._losses), self._limits.spike_factor)

    def books(
        self,
        now_s: float,
        usd: Decimal,
        usd_per_hour: Decimal,
        market_usd: Decimal = Decimal(0),
    ) -> Books:
        """The run's books, from what this driver has cost and what its nodes cost an hour."""
        pace = self._pace.measured(Running((), now_s, has_left=False), now_s)
        step = max(pace.step, self._first_step)
        left = float((self._epoch + 1) * self._steps_per_epoch) - step
        return Books(
            now_s=now_s,
            started_s=self._before.started_s,
            usd=self._before.usd + usd,
            epoch_usd=self._by_epoch.get(self._epoch, Decimal(0)) + usd - self._booked_usd,
            usd_per_hour=usd_per_hour,
            step=step,
            steps=self._steps,
            step_s=pace.step_s,
            save_s=pace.save_s,
            epoch_steps_left=max(0.0, left),
            market_usd=market_usd,
        )

    def so_far(self, books: Books) -> str | None:
        """The dollars of the run against its limit, for a person; None without one."""
        limit = self._limits.max_dollars_per_run
        if limit is None:
            return None
        text = f"{usd_text(books.usd, limit)} of {usd_text(limit)}"
        if books.step_s is not None:
            end_usd = books.usd + books.later_usd((books.steps - books.step) * books.step_s)
            text += f" (about {usd_text(end_usd, limit)} at the end)"
        return text

    def shares(self, books: Books) -> dict[str, float]:
        """How much of each limit is used, by its name."""
        return budget.shares(self._limits, books)

    def decide(self, books: Books, unpriced: str | None = None) -> Act:
        """What to do now. ``unpriced`` names a node whose price is not known."""
        if self._stop is None:
            verdict = budget.judge(self._limits, books)
            why = self._spike or verdict.stop
            if why is None and unpriced is not None and self._limits.needs_prices:
                why = unpriced_text(unpriced)
            if why is None:
                cautions = [each for each in verdict.cautions if each.key not in self._told]
                self._told |= {each.key for each in cautions}
                return replace(self._by_price(books), cautions=tuple(cautions))
            self._stop = why, books.now_s + books.stop_s + _PATIENCE_S
        why, until_s = self._stop
        if self._attempt is None or books.now_s >= until_s or books.step >= self._steps:
            return Act(reason=why, end=books.step < self._steps)
        return Act(reason=why, leave=self._attempt, hold=True)

    def _by_price(self, books: Books) -> Act:
        """Wait while the price is too high, and go on when it is not."""
        why = budget.pause(self._limits, books)
        if why is None:
            was_paused, self._paused = self._paused, False
            return Act(hold=False if was_paused else None)
        self._paused = True
        return Act(reason=why, leave=self._attempt, hold=True)

    @property
    def paused(self) -> bool:
        """Whether the run waits for lower prices."""
        return self._paused


def unpriced_text(what: str) -> str:
    """Why a run with a budget does not use nodes whose price is not known."""
    return (
        f"the price of {what} is not known, and the job has a budget; put the type into the "
        "catalogue (cost.catalogue), or set budget.allow_unknown_price: true"
    )
