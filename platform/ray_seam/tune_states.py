"""The states that trials have saved, where they are, and which of them are still needed.

A state is on the seat where its trial ran when it was saved. One on the same node is opened there;
for another node its content goes through Ray's object store. A state that is lost is made again by
its lineage: the values, and the number of results with each, that led to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Stretch = tuple[dict[str, Any], int]
"""Values, and how many results a trial had with them."""


@dataclass
class SavedState:
    """``path`` is the pending call whose answer is the file with it; None if there is none."""

    number: int
    trial_id: str
    step: Any
    lineage: tuple[Stretch, ...]
    node_id: str | None
    actor: Any
    path: Any

    @property
    def name(self) -> str:
        return f"{self.trial_id}-{self.number}"

    def on(self, seat: Any, sweep_id: str) -> Any:
        """What an actor is given to go on from it: the file, its content, or nothing."""
        if self.path is None or seat.node_id == self.node_id:
            return self.path
        return self.actor.state.remote(sweep_id, self.name, self.path)


@dataclass
class SavedStates:
    """By name. ``base`` is the state that a trial last began from, ``newest`` the last it saved for
    others, ``paused`` what a trial that waits goes on from if its seat is taken.

    ``referenced`` tells the names that Ray Tune may come back to.
    """

    referenced: Callable[[], Collection[str]] = tuple
    by_name: dict[str, SavedState] = field(default_factory=dict)
    base: dict[str, SavedState] = field(default_factory=dict)
    newest: dict[str, SavedState] = field(default_factory=dict)
    paused: dict[str, SavedState] = field(default_factory=dict)
    taking_over: set[str] = field(default_factory=set)
    _numbers: Any = field(default_factory=count)

    def add(
        self, trial_id: str, last: Stretch, step: Any, seat: Any, sweep_id: str, *, running: bool
    ) -> SavedState:
        """A trial's present state; it is saved if the trial is ``running``."""
        before = self.base[trial_id].lineage if trial_id in self.base else ()
        number, lineage = next(self._numbers), (*before, last)
        found = SavedState(number, trial_id, step, lineage, seat.node_id, seat.actor, None)
        if running:
            found.path = seat.actor.save.remote(sweep_id, trial_id, found.name)
            seat.unordered = (*seat.unordered, found.path)
        self.by_name[found.name] = found
        return found

    def began(self, trial_id: str, source: SavedState) -> None:
        """A trial begins anew from a state."""
        self.taking_over.discard(trial_id)
        self.paused.pop(trial_id, None)
        self.base[trial_id] = source

    def pauses(self, trial_id: str) -> None:
        """A trial waits, at the state that it has saved last: for that, or for others."""
        saved = [states[trial_id] for states in (self.paused, self.newest) if trial_id in states]
        if saved:
            self.paused[trial_id] = max(saved, key=lambda state: state.number)

    def ended(self, trial_id: str) -> None:
        """A trial goes on no more."""
        for states in (self.base, self.newest, self.paused):
            states.pop(trial_id, None)

    def lost(self, trial_id: str) -> None:
        """A trial has failed: what it began from may be why, and is made again the next time."""
        self.paused.pop(trial_id, None)
        if trial_id in self.base:
            self.base[trial_id].path = None

    def drop_unused(self, sweep_id: str) -> None:
        """Let go of what nothing goes on from any more."""
        needed = (*self.base.values(), *self.newest.values(), *self.paused.values())
        kept = {state.name for state in needed}
        unused = set(self.by_name) - kept - set(self.referenced())
        for name in unused:
            state = self.by_name.pop(name)
            if state.path is not None:
                state.actor.drop.remote(sweep_id, [name])
