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

    name: str
    trial_id: str
    step: Any
    lineage: tuple[Stretch, ...]
    seat: Any
    actor: Any
    path: Any

    def on(self, seat: Any, sweep_id: str) -> Any:
        """What an actor is given to go on from it: the file, its content, or nothing."""
        if self.path is None or seat.node_id == self.seat.node_id:
            return self.path
        return self.actor.state.remote(sweep_id, self.name, self.path)


@dataclass
class SavedStates:
    """By name. ``base`` is the state that a trial last began from, ``newest`` the last it saved.

    ``referenced`` tells the names that Ray Tune may come back to.
    """

    referenced: Callable[[], Collection[str]] = tuple
    by_name: dict[str, SavedState] = field(default_factory=dict)
    base: dict[str, SavedState] = field(default_factory=dict)
    newest: dict[str, SavedState] = field(default_factory=dict)
    taking_over: set[str] = field(default_factory=set)
    _numbers: Any = field(default_factory=count)

    def add(
        self, trial_id: str, last: Stretch, step: Any, seat: Any, sweep_id: str, *, running: bool
    ) -> str:
        """Have the trial's present state saved if it is ``running``; the name of the state."""
        name = f"{trial_id}-{next(self._numbers)}"
        before = self.base[trial_id].lineage if trial_id in self.base else ()
        path = seat.actor.save.remote(sweep_id, trial_id, name) if running else None
        found = SavedState(name, trial_id, step, (*before, last), seat, seat.actor, path)
        self.by_name[name] = self.newest[trial_id] = found
        self._drop(sweep_id)
        return name

    def began(self, trial_id: str, source: SavedState) -> None:
        """A trial begins anew from a state."""
        self.taking_over.discard(trial_id)
        self.base[trial_id] = source

    def lost(self, trial_id: str) -> None:
        """A trial has failed: what it began from may be why, and is made again the next time."""
        if trial_id in self.base:
            self.base[trial_id].path = None

    def _drop(self, sweep_id: str) -> None:
        kept = {state.name for state in (*self.base.values(), *self.newest.values())}
        unused = set(self.by_name) - kept - set(self.referenced())
        for name in unused:
            state = self.by_name.pop(name)
            if state.path is not None:
                state.actor.drop.remote(sweep_id, [name])
