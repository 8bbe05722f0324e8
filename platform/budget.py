"""What a run may spend, and what follows from its books: pure decisions.

Promises: a limit is said to be reached while there is still money (or time) for the step at work
and the save, so that the run ends within it; each caution is given once, at 80% and when the run is
seen to go over; a limit of 0 lets nothing run. Nothing here acts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AwareDatetime, BeforeValidator, Field, PlainSerializer, model_validator

from ebbtide.platform.account import usd_text
from ebbtide.platform.config import Config

WARN_AT = Decimal("0.8")

STOP_S = 4.0
"""What lies between the decision and the end of the run, beside the step at work and the save."""

SPIKE_STEPS = 20
"""A step's loss is compared with the median of so many before it."""

SPIKE_FACTOR = 1.5
"""What ``kill_on_loss_spike: true`` means."""


def _number(value: Any) -> Any:
    if isinstance(value, str | bool):
        raise ValueError("must be a number of dollars, such as 12.50")
    return value


def timestamp(value: Any) -> Any:
    """A field that only takes a time, written as one."""
    if not isinstance(value, str | datetime):
        raise ValueError("must be a time with its zone, such as 2026-01-31T18:00:00Z")
    return value


Usd = Annotated[
    Decimal,
    Field(ge=0, le=10**15, allow_inf_nan=False),
    BeforeValidator(_number),
    PlainSerializer(float, return_type=float, when_used="json"),
]
Factor = Annotated[float, Field(gt=1)]


class SharedBudget(Config):
    """A sum that many runs draw from: ``max_dollars`` for all that name the same ``uri``."""

    uri: Annotated[str, Field(min_length=1)]
    max_dollars: Usd


class BudgetConfig(Config):
    """What one run may cost. Dollars of ``max_dollars_per_run`` count from the run's first start.

    ``kill_on_loss_spike`` N stops the run when the loss of a step is above N times the median of
    the 20 before it; ``true`` is 1.5. ``pause_above_usd_per_hour``: while the run's nodes together
    cost more, the run has saved, has given its nodes back, and waits. A run with a dollar limit is
    refused nodes without a known price, unless ``allow_unknown_price`` takes their time as free.
    """

    max_dollars_per_run: Usd | None = None
    max_dollars_per_epoch: Usd | None = None
    max_dollars_per_hour: Usd | None = None
    deadline: Annotated[AwareDatetime, BeforeValidator(timestamp)] | None = None
    kill_on_loss_spike: bool | Factor = False
    pause_above_usd_per_hour: Usd | None = None
    allow_unknown_price: bool = False
    shared: SharedBudget | None = None

    @model_validator(mode="after")
    def _share_is_known(self) -> BudgetConfig:
        if self.shared is not None and self.max_dollars_per_run is None:
            raise ValueError(
                "budget.shared needs budget.max_dollars_per_run: what this run may take of it"
            )
        return self

    @property
    def needs_prices(self) -> bool:
        """Whether a node without a known price has to be refused."""
        limits = (
            self.max_dollars_per_run,
            self.max_dollars_per_epoch,
            self.max_dollars_per_hour,
            self.pause_above_usd_per_hour,
        )
        return not self.allow_unknown_price and any(limit is not None for limit in limits)

    @property
    def spike_factor(self) -> float | None:
        """So many times the median loss stop the run; None for never."""
        factor = self.kill_on_loss_spike
        if isinstance(factor, bool):
            return SPIKE_FACTOR if factor else None
        return factor


@dataclass(frozen=True)
class Books:
    """What a run has cost since its first start, and how far it is, at one moment.

    ``epoch_usd`` is of the epoch at work; ``usd_per_hour`` of the nodes that it has, ``market_usd``
    what those, or the ones that it had last, would cost an hour now. ``save_s`` and ``step_s`` are
    how long a save and a step take, None before there was one. Times are epoch seconds.
    """

    now_s: float
    started_s: float
    usd: Decimal
    epoch_usd: Decimal
    usd_per_hour: Decimal
    step: int
    steps: int
    step_s: float | None = None
    save_s: float | None = None
    epoch_steps_left: float = 0.0
    market_usd: Decimal = Decimal(0)

    @property
    def stop_s(self) -> float:
        """How long the run would go on if it was told to stop now."""
        return STOP_S + (self.save_s or 0.0) + (self.step_s or 0.0)

    def later_usd(self, seconds: float) -> Decimal:
        """What so many seconds cost at the present rate."""
        return self.usd_per_hour * Decimal(seconds) / 3600


@dataclass(frozen=True)
class Caution:
    """Something to say once; ``key`` tells it from others."""

    key: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """``stop`` is why the run has to save and end, None if it may go on."""

    stop: str | None = None
    cautions: tuple[Caution, ...] = ()


@dataclass(frozen=True)
class _Use:
    """How much of a limit is used: now, if the run stopped now, and at its end."""

    name: str
    limit: Decimal
    now: Decimal
    if_stopped: Decimal
    at_end: Decimal | None
    is_time: bool = False

    def text(self, amount: Decimal) -> str:
        return _hours(amount) if self.is_time else usd_text(amount, self.limit)


def refusal(budget: BudgetConfig, now_s: float) -> str | None:
    """Why a run with this budget must not start at all, whatever it costs; or None."""
    for name in ("max_dollars_per_run", "max_dollars_per_epoch", "max_dollars_per_hour"):
        if getattr(budget, name) == 0:
            return f"budget.{name} is 0: nothing runs; raise it, or remove it"
    if budget.deadline is not None and budget.deadline.timestamp() <= now_s:
        return f"budget.deadline {_time(budget.deadline)} has passed; move it, or remove it"
    return None


def judge(budget: BudgetConfig, books: Books) -> Verdict:
    """What the limits say at this moment. The loss is :func:`spike`'s."""
    cautions: list[Caution] = []
    for use in _uses(budget, books):
        if use.if_stopped >= use.limit:
            return Verdict(_reached(use, books))
        if use.now >= WARN_AT * use.limit:
            text = f"{use.text(use.now)} of {use.name} {use.text(use.limit)} are used"
            cautions.append(Caution(f"{use.name} 80%", text))
        if use.at_end is not None and use.at_end > use.limit:
            text = (
                f"{use.name} is {use.text(use.limit)}, and at this pace it takes "
                f"{use.text(use.at_end)}: the run will be stopped at the limit"
            )
            cautions.append(Caution(f"{use.name} projected", text))
    rate_limit = budget.max_dollars_per_hour
    if rate_limit is not None:
        rate, limit = (usd_text(usd, rate_limit) for usd in (books.usd_per_hour, rate_limit))
        if books.usd_per_hour > rate_limit:
            return Verdict(
                f"the run's nodes cost {rate} an hour, budget.max_dollars_per_hour is {limit}"
            )
        if books.usd_per_hour >= WARN_AT * rate_limit:
            text = f"the run's nodes cost {rate} of budget.max_dollars_per_hour {limit}"
            cautions.append(Caution("max_dollars_per_hour 80%", text))
    return Verdict(None, tuple(cautions))


def shares(budget: BudgetConfig, books: Books) -> dict[str, float]:
    """How much of each limit is used, by its name; 1 is all of it."""
    used = {use.name: (use.now, use.limit) for use in _uses(budget, books)}
    if budget.max_dollars_per_hour is not None:
        used["budget.max_dollars_per_hour"] = (books.usd_per_hour, budget.max_dollars_per_hour)
    return {
        name.removeprefix("budget."): float(now / limit)
        for name, (now, limit) in used.items()
        if limit > 0
    }


def pause(budget: BudgetConfig, books: Books) -> str | None:
    """Why the run has to wait for lower prices, or None."""
    limit = budget.pause_above_usd_per_hour
    if limit is None or books.market_usd <= limit:
        return None
    return (
        f"the run's nodes cost {usd_text(books.market_usd, limit)} an hour, "
        f"budget.pause_above_usd_per_hour is {usd_text(limit)}"
    )


def _uses(budget: BudgetConfig, books: Books) -> Iterator[_Use]:
    stop_usd = books.later_usd(books.stop_s)
    left_s = None if books.step_s is None else (books.steps - books.step) * books.step_s

    def dollars(name: str, limit: Decimal, now: Decimal, left_s: float | None) -> _Use:
        at_end = None if left_s is None else now + books.later_usd(left_s)
        return _Use(f"budget.{name}", limit, now, now + stop_usd, at_end)

    if budget.max_dollars_per_run is not None:
        yield dollars("max_dollars_per_run", budget.max_dollars_per_run, books.usd, left_s)
    if budget.max_dollars_per_epoch is not None:
        steps_left = min(books.epoch_steps_left, books.steps - books.step)
        epoch_left_s = None if books.step_s is None else steps_left * books.step_s
        limit = budget.max_dollars_per_epoch
        yield dollars("max_dollars_per_epoch", limit, books.epoch_usd, epoch_left_s)
    if budget.deadline is not None:
        used = Decimal(books.now_s - books.started_s)
        yield _Use(
            "budget.deadline",
            Decimal(budget.deadline.timestamp() - books.started_s),
            used,
            used + Decimal(books.stop_s),
            None if left_s is None else used + Decimal(left_s),
            is_time=True,
        )


def _reached(use: _Use, books: Books) -> str:
    if use.is_time:
        return f"{use.name} is {use.text(use.limit - use.now)} away, and a save takes its time"
    return f"{use.text(use.now)} of {use.name} {use.text(use.limit)} are spent"


def spike(losses: Sequence[float], factor: float | None) -> str | None:
    """Why the newest of the ``losses`` (oldest first) has to stop the run, or None."""
    if factor is None or len(losses) <= SPIKE_STEPS:
        return None
    usual = statistics.median(losses[-SPIKE_STEPS - 1 : -1])
    if losses[-1] <= factor * usual:
        return None
    return (
        f"the loss is {losses[-1]:.4g}, more than {factor:g} times the median of the "
        f"{SPIKE_STEPS} steps before ({usual:.4g}): budget.kill_on_loss_spike"
    )


def _hours(seconds: Decimal) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{seconds:.0f} s"


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
