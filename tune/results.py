"""What a sweep found: its trials, the best of them, and the table that shows both. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["running", "finished", "stopped", "failed"]
"""``stopped``: early, by the scheduler, with a result. ``failed``: without one; see the reason."""


@dataclass
class Trial:
    """One configuration and what came of it. ``reports`` are in the order of steps."""

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
    reports: list[dict[str, float]] = field(default_factory=list)

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
    """A sweep's outcome. ``first_trial_s``: from the call to the start of the first trial."""

    name: str
    uri: str
    metric: str
    mode: Literal["min", "max"]
    status: Literal["finished", "interrupted"]
    trials: tuple[Trial, ...]
    seconds: float
    first_trial_s: float | None
    best_file: str | None = None

    @property
    def best(self) -> Trial | None:
        return best(self.trials, self.mode)

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "failed"]

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
