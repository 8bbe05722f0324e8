"""The clairvoyant optimum: the least that a job can cost in a window whose future is known.

Exact backward dynamic program over (ticks left, work left, what runs), by the simulator's rules.
Work left is held as slack = ticks left - work left: it only falls, so few values occur, and all
slacks of many windows are one array operation. A start is taken whole, its delay included, as
giving up a start that is under way never pays when the future is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ebbtide.platform.market.policy import Terms
from ebbtide.platform.market.simulator import HOUR_S, Window, whole_ticks

Values = NDArray[np.float64]
IDLE, ON_DEMAND, SPOT = 0, 1, 2
"""What runs: nothing, on-demand, spot in zone ``state - SPOT``."""


def optimum_usd(terms: Terms, windows: Sequence[Window]) -> list[float]:
    """The least dollars for each window; infinite where not even on-demand meets the deadline.

    All windows have the ticks and zones of ``terms``. The last tick of work is paid to its
    end only.
    """
    if not windows:
        return []
    ticks = int(terms.deadline_s / terms.tick_s + 1e-9)
    work = int(np.ceil(terms.work_s / terms.tick_s - 1e-9))
    if work > ticks:
        return [float("inf")] * len(windows)
    delay = whole_ticks(terms.restart_s, terms.tick_s)
    offered = np.array([[zone.nodes[:ticks] for zone in window.zones] for window in windows])
    spot = np.array([list(zip(*window.spot_usd()[:ticks], strict=True)) for window in windows])
    on_demand = np.array([[window.on_demand_usd_per_hour] for window in windows])
    last = terms.work_s / terms.tick_s - (work - 1)
    cost = _solve(offered >= terms.nodes, spot, on_demand, work, ticks, delay, last)
    return [float(value) * terms.nodes * terms.tick_s / HOUR_S for value in cost]


def _solve(
    able: NDArray[np.bool_],
    spot: Values,
    on_demand: Values,
    work: int,
    ticks: int,
    delay: int,
    last_part: float,
) -> Values:
    """Least cost per node in dollars-an-hour x ticks. ``able``, ``spot``: [window, zone, tick];
    ``last_part``: how much of a tick the last tick of work takes."""
    windows, zones, _ = able.shape
    slacks = ticks - work + 1
    start_usd, may_start = _starts(able, spot, delay)
    ring = [np.zeros((SPOT + zones, windows, slacks)) for _ in range(delay + 2)]
    for left in range(1, ticks + 1):
        tick = ticks - left
        now, last = ring[left % len(ring)], ring[(left - 1) % len(ring)]
        idle = now[IDLE]
        idle[:, 0] = np.inf
        idle[:, 1:] = last[IDLE, :, :-1]
        paid = np.ones(slacks)
        paid[left - 1 : left] = last_part  # where one tick of work is left
        running = [last[ON_DEMAND] + on_demand * paid]
        for zone in range(zones):
            usd = np.where(able[:, zone, tick], spot[:, zone, tick], np.inf)
            running.append(last[SPOT + zone] + usd[:, None] * paid)
        if delay == 0:
            for value in running:
                np.minimum(idle, value, out=idle)
        elif left > delay and slacks > delay:
            then = ring[(left - delay) % len(ring)]
            tail = idle[:, delay:]
            np.minimum(tail, then[ON_DEMAND, :, :-delay] + delay * on_demand, out=tail)
            for zone in range(zones):
                usd = np.where(may_start[:, zone, tick], start_usd[:, zone, tick], np.inf)
                np.minimum(tail, then[SPOT + zone, :, :-delay] + usd[:, None], out=tail)
        for state, value in enumerate(running, start=1):
            np.minimum(idle, value, out=now[state])
        if left < slacks:
            now[:, :, left:] = 0.0  # slack >= ticks left: the work is done
    least: Values = ring[ticks % len(ring)][IDLE, :, slacks - 1]
    return least


def _starts(able: NDArray[np.bool_], spot: Values, delay: int) -> tuple[Values, NDArray[np.bool_]]:
    """What a start at each tick costs, and whether the zone holds out for the whole delay."""
    paid = np.concatenate([np.zeros_like(spot[:, :, :1]), spot.cumsum(axis=2)], axis=2)
    held = np.concatenate([np.zeros_like(spot[:, :, :1]), able.cumsum(axis=2)], axis=2)
    last = spot.shape[2] - delay
    cost, may = np.full_like(spot, np.inf), np.zeros_like(able)
    if last >= 0:
        cost[:, :, : last + 1] = (paid[:, :, delay:] - paid[:, :, : last + 1])[
            :, :, : spot.shape[2]
        ]
        may[:, :, : last + 1] = (held[:, :, delay:] - held[:, :, : last + 1] == delay)[
            :, :, : spot.shape[2]
        ]
    return cost, may
