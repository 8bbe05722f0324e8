"""Whether two runs are the same run: what their events say, step by step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbtide.train.events import Event, StateDigest, Step
from ebbtide.train.history import History

_COMPARED = ("samples", "tokens", "epoch", "lr", "loss", "grad_norm")


@dataclass(frozen=True)
class Difference:
    """The first step at which two runs differ, in what, and the two values."""

    step: int
    what: str
    one: str
    other: str


@dataclass(frozen=True)
class Comparison:
    """``steps`` is how many steps both runs kept; of ``digests`` of them the state was compared.

    ``only_one`` and ``only_other`` count the steps that the other run does not have.
    """

    steps: int
    digests: int
    only_one: int
    only_other: int
    difference: Difference | None


def compare(one: Iterable[Event], other: Iterable[Event]) -> Comparison:
    """Compare the kept steps of two runs, bit by bit."""
    one, other = list(one), list(other)
    kept, kept_other = History(one).kept, History(other).kept
    states, states_other = _states(one, kept), _states(other, kept_other)
    common = sorted(kept.keys() & kept_other.keys())
    difference = None
    for step in common:
        difference = _in_step(kept[step], kept_other[step])
        if difference is None and step in states and step in states_other:
            difference = _in_state(step, states[step], states_other[step])
        if difference is not None:
            break
    return Comparison(
        steps=len(common),
        digests=len(states.keys() & states_other.keys()),
        only_one=len(kept) - len(common),
        only_other=len(kept_other) - len(common),
        difference=difference,
    )


def _states(events: Iterable[Event], kept: Mapping[int, Step]) -> dict[int, Mapping[str, str]]:
    """The digests of the kept steps: of a step made twice, those of the attempt that kept it."""
    return {
        event.step: event.tensors
        for event in events
        if isinstance(event, StateDigest)
        and event.step in kept
        and kept[event.step].attempt == event.attempt
    }


def _in_step(one: Step, other: Step) -> Difference | None:
    for name in _COMPARED:
        value, value_other = getattr(one, name), getattr(other, name)
        if value != value_other:
            return Difference(one.step, name, repr(value), repr(value_other))
    return None


def _in_state(step: int, one: Mapping[str, str], other: Mapping[str, str]) -> Difference | None:
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            return Difference(step, name, one.get(name, "absent"), other.get(name, "absent"))
    return None
