"""What a sweep found: its trials, the best of them, and the table that shows both. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal
from typing import Any, Literal

SweepStatus = Literal["finished", "interrupted", "budget"]
Status = Literal["running", "finished", "stopped", "failed"]
"""``stopped``: early, by the scheduler, with a result. ``failed``: without one; see the reason."""


@dataclass
class Trial:
    """One configuration and what came of it. ``reports`` are in the order of steps.

    ``seconds`` and ``usd`` are of its last try; ``usd`` is None where no price is known.
    ``taken_over`` are the states of others that it went on from: at which ``step``, ``from`` which
    trial, and the ``values`` since. ``values`` are the last ones.
    """

    number: int
    trial_id: str
    values: dict[str, Any]
    status: Status = "running"
    metric: float | None = None
    reason: str | None = None
    details: str | None = None
    tries: int = 0
    started_at_s: float = 0.0
    seconds: float = 0.0
    usd: Decimal | None = None
    reports: list[dict[str, float]] = field(default_factory=list)
    taken_over: list[dict[str, Any]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether it may be the best."""
        return (
            self.status in ("finished", "stopped")
            and self.metric is not None
            and math.isfinite(self.metric)
        )


def best(trials: Sequence[Trial], mode: Literal["min", "max"]) -> Trial | None:
    """The trial with the best metric; of equals the first. Failed ones are never it."""
    usable = [trial for trial in trials if trial.usable]
    sign = 1.0 if mode == "min" else -1.0
    return min(usable, key=lambda trial: (sign * (trial.metric or 0.0), trial.number), default=None)


@dataclass(frozen=True)
class SweepResult:
    """A sweep's outcome. ``first_trial_s``: from the call to the start of the first trial.

    ``budget``: the sweep ended at the ``limit``, with what it had by then. ``usd``: what it has
    cost, None if no price is known, ``partial`` where some is not. ``saved_s``: seconds of start-up
    that trials in processes of their own would have taken more. ``fit_s``: seconds in Ray Tune's
    loop, of the last driver.
    """

    name: str
    uri: str
    metric: str
    mode: Literal["min", "max"]
    status: SweepStatus
    trials: tuple[Trial, ...]
    seconds: float
    first_trial_s: float | None
    best_file: str | None = None
    limit: str | None = None
    usd: Decimal | None = None
    partial: bool = False
    saved_s: float = 0.0
    fit_s: float = 0.0

    @property
    def best(self) -> Trial | None:
        return best(self.trials, self.mode)

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "failed"]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SweepResult:
        """The result that a :meth:`document` is of."""
        own = {field.name for field in fields(cls)}
        found = {key: value for key, value in document.items() if key in own}
        found["trials"] = tuple(
            Trial(**{**trial, "usd": None if trial["usd"] is None else Decimal(trial["usd"])})
            for trial in found["trials"]
        )
        if found.get("usd") is not None:
            found["usd"] = Decimal(found["usd"])
        return cls(**found)

    def document(self) -> dict[str, Any]:
        """The result as JSON; numbers that are not finite become text."""
        found = self.best
        document = {
            **asdict(self),
            "best": None if found is None else {"number": found.number, **found.values},
            "best_metric": None if found is None else found.metric,
            "failed": len(self.failed),
        }
        safe: dict[str, Any] = json.loads(json.dumps(document, default=str), parse_constant=str)
        return safe
