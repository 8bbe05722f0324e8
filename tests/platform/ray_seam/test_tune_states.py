"""Which states of trials are kept, and how one gets to where it is needed. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ebbtide.platform.ray_seam.tune_states import SavedState, SavedStates


@dataclass
class Actor:
    """Notes what it is called with; the answer to a call is its name."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *arguments: Any) -> str:
                actor.calls.append((name, *arguments))
                return name

        return Method()


@dataclass
class Seat:
    node_id: str
    actor: Actor = field(default_factory=Actor)
    unordered: tuple[Any, ...] = ()


def save(states: SavedStates, seat: Seat, trial_id: str, speed: int, count: int) -> SavedState:
    """As for other trials."""
    stretch = ({"speed": speed}, count)
    found = states.add(trial_id, stretch, 3 * count, seat, "sweep", running=True)
    states.newest[trial_id] = found
    states.drop_unused("sweep")
    return found


def test_a_state_is_opened_on_its_node_and_sent_to_others() -> None:
    states, seat = SavedStates(), Seat("here")
    state = save(states, seat, "a", 1, 2)
    assert state.on(Seat("here"), "sweep") == "save"
    assert state.on(Seat("there"), "sweep") == "state"
    assert seat.actor.calls == [("save", "sweep", "a", state.name)] + [
        ("state", "sweep", state.name, "save")
    ]
    states.began("b", state)
    states.lost("b")
    assert state.on(Seat("here"), "sweep") is None


def test_the_lineage_of_a_state_is_all_that_led_to_it() -> None:
    states, seat = SavedStates(), Seat("here")
    first = save(states, seat, "a", 1, 2)
    states.began("b", first)
    second = save(states, seat, "b", 5, 3)
    assert second.lineage == (({"speed": 1}, 2), ({"speed": 5}, 3))


def test_what_nothing_goes_on_from_is_dropped() -> None:
    states, seat = SavedStates(), Seat("here")
    first, second = (save(states, seat, "a", 1, count) for count in (1, 2))
    assert set(states.by_name) == {second.name}
    states.began("b", second)
    third = save(states, seat, "a", 1, 3)
    assert set(states.by_name) == {second.name, third.name}
    states.referenced = lambda: [third.name]
    states.ended("a")
    states.ended("b")
    states.drop_unused("sweep")
    assert set(states.by_name) == {third.name}
    dropped = [call for call in seat.actor.calls if call[0] == "drop"]
    assert dropped == [("drop", "sweep", [each.name]) for each in (first, second)]


def test_a_trial_that_waits_goes_on_from_what_it_saved_last() -> None:
    states, seat = SavedStates(), Seat("here")
    for_others = save(states, seat, "a", 1, 2)
    states.pauses("a")
    assert states.paused["a"] is for_others
    states.paused["a"] = states.add("a", ({}, 3), 9, seat, "sweep", running=True)
    states.pauses("a")
    assert states.paused["a"].step == 9
    states.lost("a")
    assert "a" not in states.paused
