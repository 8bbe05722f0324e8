"""A policy at work on a real cluster: what it is shown there, and what its answer means. Pure.

A cluster does not say how many spot nodes could be had, so that is learnt by asking. A zone that
holds the job's nodes has them; any other is taken to have them until it was asked and did not give
them within ``give_up_s``, or took them away; then it is closed for ``retry_s``. What runs goes on
while nodes are asked for elsewhere, and is left only when those are there.

Promises: the policy is the simulator's own object, and sees the past only; every change of mind has
a reason in words; the state between two decisions is a value that can be stored and taken up again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ebbtide.platform.market.policy import (
    IDLE,
    Placement,
    Policy,
    Seen,
    Terms,
    latest_start,
)
from ebbtide.platform.nodes import LABEL_MARKET, LABEL_ZONE
from ebbtide.platform.prices import Market

ANY_ZONE = "any"
"""The zone of a job that leaves the choice to the cloud: nodes whatever their zone is called."""


class Place(NamedTuple):
    """Where nodes are: bought how, and for spot in which zone."""

    market: Market
    zone: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels that select its nodes."""
        zone = {} if self.zone in (None, ANY_ZONE) else {LABEL_ZONE: str(self.zone)}
        return {LABEL_MARKET: self.market.value, **zone}

    def __str__(self) -> str:
        return " ".join(filter(None, (self.market.value.replace("_", "-"), self.zone)))


def place_of(labels: Mapping[str, str], zones: Collection[str] = ()) -> Place | None:
    """The place of a node, for a job with these zones; None for one without a known market."""
    label = labels.get(LABEL_MARKET)
    if label not in set(Market):
        return None
    market = Market(label)
    if market is not Market.SPOT:
        return Place(market)
    return Place(market, ANY_ZONE if ANY_ZONE in zones else labels.get(LABEL_ZONE))


@dataclass(frozen=True)
class View:
    """What is seen at one moment (epoch seconds).

    ``nodes`` are those that could be used, by place, without any that is announced to go.
    ``running`` is where the ranks are, which make no step for ``starting_s`` more. Prices are
    dollars an hour of one node, ``spot_usd`` in the order of the policy's zones.
    """

    now_s: float
    nodes: Mapping[Place, int]
    running: Place | None
    starting_s: float
    work_left_s: float
    spot_usd: tuple[float, ...]
    on_demand_usd: float


@dataclass(frozen=True)
class Decision:
    """Where the run's nodes should be; None: nowhere, for now. ``reason``: why this has changed."""

    place: Place | None
    reason: str | None = None


@dataclass(frozen=True)
class State:
    """Between two decisions. ``closed`` zones have no spot until then (epoch s); ``asked``: the
    zone that is asked for spot, and since when; ``held``: the zone that had the job's nodes;
    ``notes``: what has happened since the last change of mind."""

    terms: Terms
    started_s: float
    memory: Any
    closed: Mapping[str, float]
    place: Place | None = None
    decided: bool = False
    asked: tuple[str, float] | None = None
    held: str | None = None
    notes: tuple[str, ...] = ()


class LiveMarket:
    """A policy with its patience: see the module. Its methods change nothing in place."""

    def __init__(self, policy: Policy, give_up_s: float, retry_s: float) -> None:
        self._policy, self._give_up_s, self._retry_s = policy, give_up_s, retry_s

    def start(self, terms: Terms, now_s: float) -> State:
        """At the job's start."""
        return State(terms, now_s, self._policy.start(terms), {})

    def decide(self, state: State, view: View) -> tuple[Decision, State]:
        """What should run from now on; called once a tick."""
        before, state = state, self._watch(state, view)
        evicted = before.held is not None and state.held != before.held
        seen = self._seen(state, view, evicted)
        wanted, memory = self._policy.decide(state.memory, seen)
        place = _place(state.terms, wanted)
        state = replace(state, memory=memory, asked=_asked(state, place, view))
        if state.decided and place == state.place:
            return Decision(place), state
        reason = self._reason(state, view, seen, wanted, place)
        return Decision(place, reason), replace(state, place=place, decided=True, notes=())

    def _watch(self, state: State, view: View) -> State:
        """The state with what has become known of the zones."""
        now_s, notes, closed = view.now_s, list(state.notes), dict(state.closed)
        for zone, until_s in state.closed.items():
            if now_s >= until_s:
                del closed[zone]
                notes.append(f"{zone} may be asked for spot again")
        has = {zone for zone in state.terms.zones if _holds(state, view, zone)}
        for zone in has & closed.keys():
            del closed[zone]
        if state.held is not None and state.held not in has:
            closed[state.held] = now_s + self._retry_s
            notes.append(f"spot was taken away in {state.held}")
        elif state.asked is not None and now_s - state.asked[1] >= self._give_up_s:
            zone = state.asked[0]
            if zone not in has:
                closed[zone] = now_s + self._retry_s
                notes.append(f"{zone} gave no spot in {self._give_up_s:.0f} s")
        running = view.running
        held = running.zone if running is not None and running.zone in has else None
        return replace(state, closed=closed, held=held, notes=tuple(notes[-3:]))

    def _seen(self, state: State, view: View, evicted: bool) -> Seen:
        terms = state.terms
        offered = tuple(
            max(
                view.nodes.get(Place(Market.SPOT, zone), 0),
                0 if zone in state.closed else terms.nodes,
            )
            for zone in terms.zones
        )
        return Seen(
            elapsed_s=view.now_s - state.started_s,
            work_left_s=view.work_left_s,
            running=_running(terms, view),
            starting_s=view.starting_s,
            spot_nodes=offered,
            spot_usd=view.spot_usd,
            on_demand_usd=view.on_demand_usd,
            on_prem_nodes=view.nodes.get(Place(Market.ON_PREM), 0),
            evicted=evicted,
        )

    def _reason(
        self, state: State, view: View, seen: Seen, wanted: Placement, place: Place | None
    ) -> str:
        terms = state.terms
        told = list(state.notes)
        if place is None:
            told.append("waiting is cheapest, and there is time")
        elif place.market is Market.SPOT:
            price = view.spot_usd[terms.zones.index(str(place.zone))]
            told.append(f"{place} at ${price:.4g} an hour, on-demand ${view.on_demand_usd:.4g}")
        elif place.market is Market.ON_DEMAND:
            if latest_start(terms, seen, IDLE):
                told.append("the deadline leaves no time to wait")
            told.append(f"{place} at ${view.on_demand_usd:.4g} an hour")
        else:
            told.append(f"{seen.on_prem_nodes} nodes of our own are there")
        return f"{self._policy.name}: {'; '.join(told)}"


def _holds(state: State, view: View, zone: str) -> bool:
    return view.nodes.get(Place(Market.SPOT, zone), 0) >= state.terms.nodes


def _running(terms: Terms, view: View) -> Placement:
    """What runs, as the policy knows it; nothing, if what is left of it is too little."""
    place = view.running
    if place is None or view.nodes.get(place, 0) < terms.nodes:
        return IDLE
    if place.market is not Market.SPOT:
        return Placement(terms.nodes, place.market)
    if place.zone not in terms.zones:
        return IDLE
    return Placement(terms.nodes, Market.SPOT, terms.zones.index(place.zone))


def _place(terms: Terms, wanted: Placement) -> Place | None:
    if not wanted.nodes or wanted.market is None:
        return None
    return Place(wanted.market, None if wanted.zone is None else terms.zones[wanted.zone])


def _asked(state: State, place: Place | None, view: View) -> tuple[str, float] | None:
    """The zone that is asked from now on, as it does not have the nodes; since when it was."""
    if place is None or place.market is not Market.SPOT or place.zone is None:
        return None
    if _holds(state, view, place.zone):
        return None
    if state.asked is not None and state.asked[0] == place.zone:
        return state.asked
    return place.zone, view.now_s


def count(nodes: Iterable[Mapping[str, str]], zones: Collection[str] = ()) -> dict[Place, int]:
    """How many of the nodes with these labels are at each place."""
    found: dict[Place, int] = {}
    for labels in nodes:
        if (place := place_of(labels, zones)) is not None:
            found[place] = found.get(place, 0) + 1
    return found
