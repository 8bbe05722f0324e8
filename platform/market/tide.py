"""``tide``: the default policy. Deadline-aware, over several zones, and it learns as it goes.

It keeps what it has seen of the zones, learns from it how they behave (``chain``), plans the rest
of the job as if they went on so (``plan``), and plans again, more and more rarely, as it sees more.
Between plans a decision is one look into a table. Whatever a plan says, ``guarded`` starts
on-demand in the last moment, so the deadline is met if on-demand could meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ebbtide.platform.market.chain import GRADES, NONE, NONE_EDGES_STEPS, Grades, learn
from ebbtide.platform.market.hazard import AGE_EDGES_S, Series
from ebbtide.platform.market.plan import ON_DEMAND, SPOT, Plan, solve
from ebbtide.platform.market.policy import EPSILON_S, IDLE, Placement, Seen, Terms, guarded
from ebbtide.platform.prices import Market

MOST_STEPS = 1200
"""A plan has no more steps than this; it is coarser for long jobs."""
REPLANS = (0.0, 1 / 8, 1 / 3)
"""Shares of the deadline after which to plan anew."""

FIRST_AGE_S = 6240.0
"""The age that a spell is taken to have which is under way when a job first looks."""


class Outlook(NamedTuple):
    """What was learnt, and the plan for it. ``step_s``: the plan's step."""

    grades: tuple[tuple[int, ...], ...]
    plan: Plan
    step_s: float


class Memory(NamedTuple):
    """What ``Tide`` knows: a byte a tick and zone of what it saw, how long each zone's spell and
    the time without spot in any zone have lasted, and the outlook."""

    terms: Terms
    seen: tuple[bytes, ...]
    age_s: tuple[float, ...]
    none_s: float
    plans: int
    outlook: Outlook | None


@dataclass(frozen=True)
class Tide:
    """The policy; it has nothing to set."""

    name: str = "tide"

    def start(self, terms: Terms) -> Memory:
        return Memory(terms, (b"",) * len(terms.zones), (), 0.0, 0, None)

    def decide(self, memory: Memory, seen: Seen) -> tuple[Placement, Memory]:
        memory = self._watch(memory, seen)
        terms, outlook = memory.terms, memory.outlook
        if outlook is None:
            return guarded(terms, seen, Placement(terms.nodes, Market.ON_DEMAND)), memory
        return guarded(terms, seen, _decide(memory, outlook, seen)), memory

    def _watch(self, memory: Memory, seen: Seen) -> Memory:
        """The memory with this tick in it, and with a new plan if it is time for one."""
        terms = memory.terms
        able = tuple(nodes >= terms.nodes for nodes in seen.spot_nodes)
        past, first = memory.seen, not memory.age_s
        if first:
            age_s = (FIRST_AGE_S,) * len(able)
        else:
            age_s = tuple(
                age + terms.tick_s if now == was[-1] else 0.0
                for age, now, was in zip(memory.age_s, able, past, strict=True)
            )
        past = tuple(was + (b"\1" if now else b"\0") for was, now in zip(past, able, strict=True))
        none_s = 0.0 if any(able) or first else memory.none_s + terms.tick_s
        plans, outlook = memory.plans, memory.outlook
        due = plans < len(REPLANS) and seen.elapsed_s >= REPLANS[plans] * terms.deadline_s
        if due and able:
            plans += 1
            outlook = _outlook(terms, past, seen)
        return Memory(terms, past, age_s, none_s, plans, outlook)


def _decide(memory: Memory, outlook: Outlook, seen: Seen) -> Placement:
    terms, running = memory.terms, seen.running
    if running.nodes and seen.starting_s > EPSILON_S:
        return running  # a start is seen through
    plan, grades = outlook.plan, outlook.grades
    work_steps = seen.work_left_s / outlook.step_s
    slack_steps = (terms.deadline_s - seen.elapsed_s - seen.work_left_s) / outlook.step_s
    if running.market is Market.SPOT and running.zone is not None:
        grade = grades[running.zone][_age_class(memory.age_s[running.zone])]
        if plan.at(plan.spot, grade, work_steps, slack_steps) == SPOT:
            return running
    best, zone = GRADES, None
    for index, nodes in enumerate(seen.spot_nodes):
        if nodes >= terms.nodes:
            grade = grades[index][_age_class(memory.age_s[index])]
            older = zone is not None and memory.age_s[index] > memory.age_s[zone]
            if grade < best or (grade == best and older):
                best, zone = grade, index
    state = NONE + best if zone is not None else _none_state(memory.none_s / outlook.step_s)
    table = plan.on_demand if running.market is Market.ON_DEMAND else plan.idle
    act = plan.at(table, state, work_steps, slack_steps)
    if act == SPOT and zone is not None:
        return Placement(terms.nodes, Market.SPOT, zone)
    return Placement(terms.nodes, Market.ON_DEMAND) if act == ON_DEMAND else IDLE


_AGE_EDGES_S: list[float] = AGE_EDGES_S.tolist()
_NONE_EDGES: list[int] = NONE_EDGES_STEPS.tolist()


def _age_class(age_s: float) -> int:
    return sum(age_s + EPSILON_S >= edge for edge in _AGE_EDGES_S) - 1


def _none_state(steps: float) -> int:
    return sum(steps + EPSILON_S >= edge for edge in _NONE_EDGES) - 1


def _outlook(terms: Terms, past: tuple[bytes, ...], seen: Seen) -> Outlook:
    """Plan with what is known. The first plans of jobs on equal terms are the same: kept."""
    usd = tuple(seen.spot_usd)
    if len(past[0]) <= 1:
        return _first_outlook(terms, usd, seen.on_demand_usd)
    return _plan(terms, past, usd, seen)


@lru_cache(maxsize=64)
def _first_outlook(terms: Terms, usd: tuple[float, ...], on_demand_usd: float) -> Outlook:
    seen = Seen(0.0, terms.work_s, IDLE, 0.0, (), usd, on_demand_usd)
    return _plan(terms, (b"",) * len(terms.zones), usd, seen)


def _plan(terms: Terms, past: tuple[bytes, ...], usd: Sequence[float], seen: Seen) -> Outlook:
    left_s = terms.deadline_s - seen.elapsed_s
    wish_s = max(terms.tick_s, terms.restart_s / 2, left_s / MOST_STEPS)
    step_ticks = max(1, round(wish_s / terms.tick_s))
    step_s = step_ticks * terms.tick_s
    history = terms.history or (b"",) * len(terms.zones)
    chain, grades = learn(
        _series(history),
        _series(past),
        np.array(usd),
        terms.tick_s,
        step_ticks,
        terms.restart_s / 3600,
    )
    steps = int(left_s / step_s) + 2
    slack = max(0, int((left_s - seen.work_left_s) / step_s)) + 1
    delay = max(round(terms.restart_s / step_s), int(terms.restart_s > 0))
    plan = solve(chain, seen.on_demand_usd, delay, steps, min(slack, steps))
    return Outlook(_rows(grades), plan, step_s)


def _series(past: tuple[bytes, ...]) -> list[Series]:
    return [np.frombuffer(zone, dtype=np.uint8) for zone in past]


def _rows(grades: Grades) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(grade) for grade in row) for row in grades)
