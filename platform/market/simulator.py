"""Replays a policy over a window of a market, tick by tick, and adds up what it costs.

The rules, the same for every policy and for the clairvoyant optimum:

- At the start of a tick the policy sees which zones offer how many spot nodes in this tick (and
  nothing later) and says what runs in it. What it wants and the market does not offer, it does not
  get: the tick passes idle and free.
- A placement that starts is paid from its first tick and makes progress after the restart delay.
  Moving to another zone or market is a start. Stopping is free and immediate.
- Spot nodes whose zone no longer offers the gang are gone at the start of the tick, unpaid for it.
- On-demand always starts. A tick of ``n`` nodes costs ``n`` x its price x the tick's length; a job
  that finishes within a tick pays to its end.

Restart delays are whole ticks (``whole_ticks``), so that optimum and policies pay the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ebbtide.platform.market.policy import EPSILON_S, IDLE, Placement, Policy, Seen, Terms
from ebbtide.platform.market.traces import Trace
from ebbtide.platform.prices import Market

HOUR_S = 3600.0


@dataclass(frozen=True)
class Window:
    """A stretch of a market: one trace a zone, all of the same ticks, with prices.

    ``spot_usd_per_hour`` prices zones whose trace has no prices of its own.
    """

    zones: tuple[Trace, ...]
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float
    on_prem_nodes: int = 0
    on_prem_usd_per_hour: float = 0.0

    @property
    def ticks(self) -> int:
        return len(self.zones[0].nodes)

    @property
    def tick_s(self) -> float:
        return self.zones[0].tick_s

    def offers(self) -> list[tuple[int, ...]]:
        """Spot nodes of every zone, tick by tick."""
        return list(zip(*(trace.nodes.tolist() for trace in self.zones), strict=True))

    def spot_usd(self) -> list[tuple[float, ...]]:
        """Spot price of every zone, tick by tick."""
        flat = [self.spot_usd_per_hour] * self.ticks
        columns = (
            flat if trace.usd_per_hour is None else trace.usd_per_hour.tolist()
            for trace in self.zones
        )
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a window. ``hours`` are node-hours by market; ``finished_s`` is None
    where the deadline was missed."""

    usd: float
    finished_s: float | None
    starts: int
    evictions: int
    hours: Counter[Market] = field(default_factory=Counter)
    placements: tuple[Placement, ...] = ()
    """What ran in each tick, up to the end (kept on request)."""


def whole_ticks(seconds: float, tick_s: float) -> int:
    """A restart delay in ticks: the nearest number, and at least one where there is a delay."""
    return 0 if seconds <= 0 else max(1, round(seconds / tick_s))


def simulate(policy: Policy, terms: Terms, window: Window, *, keep: bool = False) -> Outcome:
    """Run the job of ``terms`` under ``policy`` from the window's first tick to its deadline.

    The window must be at least as long as the deadline, which is in whole ticks (what is left of
    one does not count). ``keep`` keeps the placements.
    """
    tick_s, needed = terms.tick_s, terms.nodes
    memory = policy.start(terms)
    running, starting_s, work_left_s = IDLE, 0.0, terms.work_s
    usd, starts, evictions = 0.0, 0, 0
    finished_s: float | None = None
    hours: Counter[Market] = Counter()
    placements: list[Placement] = []
    spot, on_prem = Market.SPOT, Market.ON_PREM
    on_demand_usd, prem_usd = window.on_demand_usd_per_hour, window.on_prem_usd_per_hour
    for tick, (offered, prices) in enumerate(zip(window.offers(), window.spot_usd(), strict=True)):
        elapsed_s = tick * tick_s
        if elapsed_s + tick_s > terms.deadline_s + EPSILON_S:
            break
        evicted = running.market is spot and offered[running.zone or 0] < needed
        if evicted:
            running, evictions, starting_s = IDLE, evictions + 1, 0.0
        seen = Seen(
            elapsed_s,
            work_left_s,
            running,
            starting_s,
            offered,
            prices,
            on_demand_usd,
            window.on_prem_nodes,
            evicted,
        )
        wanted, memory = policy.decide(memory, seen)
        if not _granted(wanted, seen):
            wanted = IDLE
        if wanted != running:
            running = wanted
            starting_s = terms.restart_s if wanted.nodes else 0.0
            starts += wanted.nodes > 0
        if keep:
            placements.append(running)
        if not running.nodes:
            continue
        market = running.market
        progress_s = max(0.0, tick_s - starting_s)
        starting_s = max(0.0, starting_s - tick_s)
        paid_s = tick_s if progress_s <= work_left_s else tick_s - progress_s + work_left_s
        work_left_s -= progress_s
        price = (
            prices[running.zone or 0]
            if market is spot
            else prem_usd
            if market is on_prem
            else on_demand_usd
        )
        usd += running.nodes * price * paid_s / HOUR_S
        if market is not None:
            hours[market] += running.nodes * paid_s / HOUR_S  # type: ignore[assignment]  # a float
        if work_left_s <= EPSILON_S:
            finished_s = elapsed_s + paid_s
            break
    return Outcome(usd, finished_s, starts, evictions, hours, tuple(placements))


def _granted(wanted: Placement, seen: Seen) -> bool:
    """Whether the market gives these nodes in this tick."""
    if wanted.market is Market.SPOT:
        return seen.spot_nodes[wanted.zone or 0] >= wanted.nodes
    if wanted.market is Market.ON_PREM:
        return seen.on_prem_nodes >= wanted.nodes
    return True


def past(traces: tuple[Trace, ...], nodes: int) -> tuple[bytes, ...]:
    """Traces as ``Terms.history``: a byte a tick, 1 where a gang of ``nodes`` could be had."""
    return tuple((trace.nodes >= nodes).astype(np.uint8).tobytes() for trace in traces)
