"""The named policies: fixed rules, worth having as they are and as what ``tide`` is measured by.

All but ``spot_only`` end with ``guarded``: however they wait, they meet a deadline that on-demand
could have met. Where several zones offer spot, the cheapest is taken, the first among equals.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.platform.market.policy import (
    EPSILON_S,
    IDLE,
    Placement,
    Seen,
    Terms,
    guarded,
)
from ebbtide.platform.prices import Market

HOUR_S = 3600.0


def spot_zones(terms: Terms, seen: Seen) -> list[int]:
    """The zones that offer the whole gang, cheapest first."""
    able = [zone for zone, nodes in enumerate(seen.spot_nodes) if nodes >= terms.nodes]
    return sorted(able, key=lambda zone: seen.spot_usd[zone]) if len(able) > 1 else able


def on_demand_nodes(terms: Terms) -> Placement:
    """The gang on demand."""
    return Placement(terms.nodes, Market.ON_DEMAND)


def any_spot(terms: Terms, seen: Seen) -> Placement:
    """Spot: where it runs, else in the cheapest zone that offers it, else nothing."""
    if seen.running.market is Market.SPOT:
        return seen.running
    zones = spot_zones(terms, seen)
    return Placement(terms.nodes, Market.SPOT, zones[0]) if zones else IDLE


@dataclass(frozen=True)
class OnDemand:
    """On-demand from the start to the end."""

    name: str = "on_demand"

    def start(self, terms: Terms) -> Terms:
        return terms

    def decide(self, memory: Terms, seen: Seen) -> tuple[Placement, Terms]:
        return on_demand_nodes(memory), memory


@dataclass(frozen=True)
class SpotOnly:
    """Spot where there is any, and waiting where there is none: the deadline may pass."""

    name: str = "spot_only"

    def start(self, terms: Terms) -> Terms:
        return terms

    def decide(self, memory: Terms, seen: Seen) -> tuple[Placement, Terms]:
        return any_spot(memory, seen), memory


@dataclass(frozen=True)
class Greedy:
    """Spot while there is time to wait for it; on-demand from the last moment on."""

    name: str = "greedy"

    def start(self, terms: Terms) -> tuple[Terms, bool]:
        return terms, False

    def decide(
        self, memory: tuple[Terms, bool], seen: Seen
    ) -> tuple[Placement, tuple[Terms, bool]]:
        terms, late = memory
        wanted = on_demand_nodes(terms) if late else guarded(terms, seen, any_spot(terms, seen))
        return wanted, (terms, wanted.market is Market.ON_DEMAND)


@dataclass(frozen=True)
class SpotWithFallback:
    """On-demand while spot fails: while more than ``threshold`` of the last ``window_s`` passed
    without a zone that offers the gang. Back to spot when it recovers."""

    threshold: float = 0.3
    window_s: float = 2 * HOUR_S
    name: str = "spot_with_fallback"

    def start(self, terms: Terms) -> tuple[Terms, bytes]:
        return terms, b""

    def decide(
        self, memory: tuple[Terms, bytes], seen: Seen
    ) -> tuple[Placement, tuple[Terms, bytes]]:
        terms, failures = memory
        spot = any_spot(terms, seen)
        ticks = max(1, round(self.window_s / terms.tick_s))
        failures = (failures + bytes([spot.nodes == 0]))[-ticks:]
        failing = sum(failures) > self.threshold * len(failures)
        wanted = on_demand_nodes(terms) if failing else spot
        return guarded(terms, seen, wanted), (terms, failures)


@dataclass(frozen=True)
class LeaveZone:
    """Spot, but in no zone that has taken nodes away more often than ``evictions_per_hour`` of its
    time with spot in the last ``window_s``; on-demand where every zone on offer is such a one."""

    evictions_per_hour: float = 0.05
    window_s: float = 24 * HOUR_S
    name: str = "leave_zone"

    def start(self, terms: Terms) -> tuple[Terms, tuple[bytes, ...]]:
        return terms, tuple(b"" for _ in terms.zones)

    def decide(
        self, memory: tuple[Terms, tuple[bytes, ...]], seen: Seen
    ) -> tuple[Placement, tuple[Terms, tuple[bytes, ...]]]:
        terms, pasts = memory
        ticks = max(2, round(self.window_s / terms.tick_s))
        pasts = tuple(
            (past + bytes([nodes >= terms.nodes]))[-ticks:]
            for past, nodes in zip(pasts, seen.spot_nodes, strict=True)
        )
        good = [
            zone
            for zone in spot_zones(terms, seen)
            if pasts[zone].count(b"\x01\x00")
            <= self.evictions_per_hour * sum(pasts[zone]) * terms.tick_s / HOUR_S
        ]
        if seen.running.market is Market.SPOT and seen.running.zone in good:
            wanted = seen.running
        elif good:
            wanted = Placement(terms.nodes, Market.SPOT, good[0])
        else:
            wanted = on_demand_nodes(terms)
        return guarded(terms, seen, wanted), (terms, pasts)


@dataclass(frozen=True)
class PricePause:
    """Spot below ``pause_above_usd_per_hour`` a node; above it the job waits for the price."""

    pause_above_usd_per_hour: float
    name: str = "price_pause"

    def start(self, terms: Terms) -> Terms:
        return terms

    def decide(self, memory: Terms, seen: Seen) -> tuple[Placement, Terms]:
        cheap = [
            zone
            for zone in spot_zones(memory, seen)
            if seen.spot_usd[zone] <= self.pause_above_usd_per_hour
        ]
        if seen.running.market is Market.SPOT and seen.running.zone in cheap:
            wanted = seen.running
        else:
            wanted = Placement(memory.nodes, Market.SPOT, cheap[0]) if cheap else IDLE
        return guarded(memory, seen, wanted), memory


@dataclass(frozen=True)
class UniformProgress:
    """Progress in step with time, on-demand where spot does not give it.

    The policy of "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024),
    with the order of its rules as published. ``stay``: on-demand is left for spot only, never to
    wait (a variant that is better nearly everywhere).
    """

    stay: bool = False
    name: str = "uniform_progress"

    def start(self, terms: Terms) -> tuple[Terms, bool]:
        return terms, False

    def decide(
        self, memory: tuple[Terms, bool], seen: Seen
    ) -> tuple[Placement, tuple[Terms, bool]]:
        terms, latched = memory
        if latched:
            return on_demand_nodes(terms), memory
        if seen.running.market is Market.SPOT:
            return guarded(terms, seen, seen.running), memory
        left_s, done_s = terms.deadline_s - seen.elapsed_s, terms.work_s - seen.work_left_s
        needed_s = seen.work_left_s + 2 * terms.restart_s
        spot = any_spot(terms, seen)
        if seen.running.market is Market.ON_DEMAND:
            ahead = done_s + EPSILON_S >= self._expected(terms, 2 * terms.restart_s, seen)
            may_leave = left_s > needed_s + seen.starting_s + EPSILON_S
            leaves = ahead and may_leave and (spot.nodes or not self.stay)
            return guarded(terms, seen, spot if leaves else seen.running), memory
        if left_s < needed_s - EPSILON_S:
            return on_demand_nodes(terms), (terms, True)
        if seen.evicted:
            return guarded(terms, seen, IDLE), memory
        if not spot.nodes and done_s < self._expected(terms, 0.0, seen) - EPSILON_S:
            spot = on_demand_nodes(terms)
        return guarded(terms, seen, spot), memory

    @staticmethod
    def _expected(terms: Terms, ahead_s: float, seen: Seen) -> float:
        return terms.work_s * (seen.elapsed_s + ahead_s) / terms.deadline_s


@dataclass(frozen=True)
class Priority:
    """The first of what is there: on-prem (green), spot (yellow), on-demand (red)."""

    name: str = "priority"

    def start(self, terms: Terms) -> Terms:
        return terms

    def decide(self, memory: Terms, seen: Seen) -> tuple[Placement, Terms]:
        if seen.on_prem_nodes >= memory.nodes:
            wanted = Placement(memory.nodes, Market.ON_PREM)
        else:
            wanted = any_spot(memory, seen)
        return guarded(memory, seen, wanted if wanted.nodes else on_demand_nodes(memory)), memory
