"""Which states of trials are kept, and how one gets to where it is needed. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ebbtide.platform.ray_seam.tune_states import SavedStates


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


def save(states: SavedStates, seat: Seat, trial_id: str, speed: int, count: int) -> str:
    stretch = ({"speed": speed}, count)
    return states.add(trial_id, stretch, 3 * count, seat, "sweep", running=True)


def test_a_state_is_opened_on_its_node_and_sent_to_others() -> None:
    states, seat = SavedStates(), Seat("here")
    state = states.by_name[save(states, seat, "a", 1, 2)]
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
    first = states.by_name[save(states, seat, "a", 1, 2)]
    states.began("b", first)
    second = states.by_name[save(states, seat, "b", 5, 3)]
    assert second.lineage == (({"speed": 1}, 2), ({"speed": 5}, 3))


def test_what_nothing_goes_on_from_is_dropped() -> None:
    states, seat = SavedStates(), Seat("here")
    names = [save(states, seat, "a", 1, count) for count in (1, 2)]
    assert set(states.by_name) == {names[1]}
    states.began("b", states.by_name[names[1]])
    states.referenced = lambda: ["held"]
    states.by_name["held"] = states.by_name[names[1]]
    later = save(states, seat, "a", 1, 3)
    assert set(states.by_name) == {names[1], "held", later}
    assert [call for call in seat.actor.calls if call[0] == "drop"] == [
        ("drop", "sweep", [names[0]])
    ]
