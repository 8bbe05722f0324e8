"""What the seam to Ray Tune asks of a pool and of a sweep, and the sweep's own state in it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ebbtide.platform.ray_seam.tune_states import SavedStates


class Seats(Protocol):
    """What the controller asks of a pool. A seat has its actor's handle as ``actor``."""

    def poll(self) -> None: ...
    def any_free(self) -> bool: ...
    def take(self) -> Any | None: ...
    def swap(self, seat: Any, wanted: Any) -> Any: ...
    def give_back(self, seat: Any, *, broken: bool, yielded: bool) -> None: ...
    def pending(self) -> list[Any]: ...


class Past(Protocol):
    """What an earlier driver of the sweep has heard. An answer is a result or an exception."""

    def has_answer(self, trial_id: str) -> bool:
        """Whether what the trial is asked next is on record."""

    def answer(self, trial_id: str) -> Any:
        """Take it off the record."""

    def is_over(self) -> bool:
        """Whether everything has been told."""

    def due(self) -> str | None:
        """The trial that was heard next; None if it is not among those of this driver (yet)."""

    def earliest(self, trial_ids: Collection[str]) -> str | None:
        """The one of these that was heard next; if none was, the order of the rest is given up."""

    def telling(self, trial_id: str) -> AbstractContextManager[None]:
        """While the trial's answer is worked on."""


class Trials(Protocol):
    """What the sweep knows of its trials, and is told."""

    def request(self, trial_id: str, values: dict[str, Any], seat: Any) -> Any:
        """What an actor is asked to run; ``values`` as they were sampled. Begins the trial."""

    def may_retry(self, trial_id: str, error: BaseException) -> bool:
        """Hears of every failure, whatever Ray raises for a call to an actor, and decides."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether an actor's own error says that the seat is no longer the sweep's."""

    def heard(self, trial_id: str) -> int:
        """How many results there were since the trial began, or took over a state."""

    def took_over(self, trial_id: str, values: dict[str, Any], source: str, step: Any) -> None:
        """A trial goes on from another's state, with values of its own."""

    def goes_on(self, trial_id: str, step: Any) -> None:
        """A failed trial, begun anew, goes on from its own state at ``step``; if that is None from
        the one that it took over last."""


@dataclass
class PooledSweep:
    """One sweep's use of a pool. Its actors have ``begin``, ``next_result``, ``save``, ``state``,
    ``drop``, ``pause``, ``forget`` and ``stop``; what ``stop`` returns says whether the seat is
    another sweep's from then on.

    With ``saves_pauses`` a paused trial may go on from a saved state on another seat; without, it
    starts again there. ``told`` has the pending answers from ``past`` and the trial they are of,
    ``paused`` the seat that keeps a paused trial's process, ``at_once`` the answers that need no
    actor.
    """

    pool: Seats
    sweep_id: str
    trials: Trials
    past: Past
    saves_pauses: bool = False
    states: SavedStates = field(default_factory=SavedStates)
    told: dict[Any, str] = field(default_factory=dict)
    paused: dict[str, Any] = field(default_factory=dict)
    at_once: set[Any] = field(default_factory=set)

    def forget(self, trial_id: str) -> None:
        """End the process of a trial if it is paused."""
        home = self.paused.pop(trial_id, None)
        if home is not None and home.actor is not None:
            home.actor.forget.remote(self.sweep_id, trial_id, home.unordered)
