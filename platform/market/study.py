"""Judging policies: windows drawn from traces, each policy run over them, the optimum beside it.

A study cuts the traces of one set in two. What a policy may learn beforehand is the first part;
windows start in the second, at ticks drawn from a seed, and never reach beyond its end. A part that
is shorter than the deadline has no window (``draw_windows`` gives none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.platform.market.baselines import (
    Greedy,
    LeaveZone,
    OnDemand,
    PricePause,
    Priority,
    SpotOnly,
    SpotWithFallback,
    UniformProgress,
)
from ebbtide.platform.market.optimum import optimum_usd
from ebbtide.platform.market.policy import Policy, Terms
from ebbtide.platform.market.simulator import Outcome, Window, past, simulate, whole_ticks
from ebbtide.platform.market.tide import Tide
from ebbtide.platform.market.traces import Trace

TICKS_PER_RESTART = 4
"""Traces are brought to ticks of about a quarter of the restart delay."""

MOST_TICKS = 1_000_000
"""From start to deadline; a job that has more is too long for its restart delay."""

POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Tide(),
        OnDemand(),
        SpotOnly(),
        Greedy(),
        SpotWithFallback(),
        LeaveZone(),
        PricePause(float("inf")),
        UniformProgress(),
        UniformProgress(stay=True, name="uniform_progress_stay"),
        Priority(),
    )
}
"""The policies by name; ``price_pause`` is to be given its price."""


@dataclass(frozen=True)
class Job:
    """What is to be run. Times in seconds, prices in dollars an hour of one node; ``spot_usd`` is
    for zones whose trace has no prices."""

    work_s: float
    deadline_s: float
    restart_s: float
    on_demand_usd: float
    spot_usd: float
    nodes: int = 1

    @property
    def tick_s(self) -> float:
        """The tick to bring traces to."""
        return self.restart_s / TICKS_PER_RESTART if self.restart_s > 0 else 60.0

    def impossible(self) -> str | None:
        """Why these times cannot be simulated, if so."""
        if self.work_s + self.restart_s > self.deadline_s:
            hours = (self.work_s + self.restart_s) / 3600
            return (
                f"the deadline is less than work and one restart ({hours:g} h): not even on-demand "
                "could meet it; raise it"
            )
        if self.deadline_s > MOST_TICKS * self.tick_s:
            hours = MOST_TICKS * self.tick_s / 3600
            return (
                f"the deadline is more than {hours:.3g} h, which is the most for a restart of "
                f"{self.restart_s:g} s: time goes by in quarters of a restart (of none: minutes)"
            )
        return None

    def terms(self, zones: Sequence[Trace], history: Sequence[Trace] = ()) -> Terms:
        """The job in ticks of its zones: the deadline rounded down, the delay to the nearest."""
        tick_s = zones[0].tick_s
        return Terms(
            work_s=self.work_s,
            deadline_s=int(self.deadline_s / tick_s + 1e-9) * tick_s,
            restart_s=whole_ticks(self.restart_s, tick_s) * tick_s,
            tick_s=tick_s,
            zones=tuple(zone.zone for zone in zones),
            nodes=self.nodes,
            history=past(tuple(history), self.nodes),
        )

    def window(self, zones: Sequence[Trace], start: int, terms: Terms) -> Window:
        """The window of ``zones`` that begins with tick ``start``."""
        stop = start + round(terms.deadline_s / terms.tick_s)
        cut = tuple(zone.between(start, stop) for zone in zones)
        return Window(cut, self.on_demand_usd, self.spot_usd)


@dataclass(frozen=True)
class Result:
    """One policy over the windows of a study, and the optimum of each."""

    outcomes: tuple[Outcome, ...]
    optimum_usd: tuple[float, ...]

    @property
    def over_optimum(self) -> tuple[float, ...]:
        """Cost by window as a multiple of the optimum's."""
        return tuple(
            outcome.usd / least
            for outcome, least in zip(self.outcomes, self.optimum_usd, strict=True)
        )

    @property
    def misses(self) -> int:
        """Windows in which the deadline was missed."""
        return sum(outcome.finished_s is None for outcome in self.outcomes)


@dataclass(frozen=True)
class Study:
    """Windows of zones for a job, with what may be learnt beforehand in ``terms``."""

    terms: Terms
    windows: tuple[Window, ...]

    def optimum(self) -> tuple[float, ...]:
        """The optimum of each window, in dollars."""
        batch = max(1, 64 // len(self.terms.zones))
        cuts = range(0, len(self.windows), batch)
        return tuple(
            usd for cut in cuts for usd in optimum_usd(self.terms, self.windows[cut : cut + batch])
        )

    def run(self, policy: Policy, optimum: tuple[float, ...], *, keep: bool = False) -> Result:
        """The policy over every window."""
        outcomes = tuple(simulate(policy, self.terms, w, keep=keep) for w in self.windows)
        return Result(outcomes, optimum)


def draw_windows(
    job: Job, zones: Sequence[Trace], count: int, draw: np.random.Generator, learn: float = 0.5
) -> Study:
    """``count`` windows of aligned zones, from what is left after the share ``learn`` of them."""
    ticks = len(zones[0].nodes)
    first = int(ticks * learn)
    terms = job.terms(zones, [zone.between(0, first) for zone in zones] if first else ())
    last = ticks - round(terms.deadline_s / terms.tick_s)
    if last < first:
        return Study(terms, ())
    starts = draw.integers(first, last + 1, size=count)
    return Study(terms, tuple(job.window(zones, int(start), terms) for start in starts))
