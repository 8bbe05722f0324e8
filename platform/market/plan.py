"""The least expected cost of finishing by the deadline, if the market were a known chain.

Backward dynamic program over (steps left, slack, what runs, what the market offers). Slack = steps
left - steps of work left: it falls by one with every step without progress and never rises, so a
plan is a table over few values. A deadline that on-demand can meet is met in every plan: what would
risk it has infinite cost.

While spot is on offer a plan never waits: to wait then, for a better zone, is to bet on the chain
alone, and when the market has changed since it was learnt the bet costs the slack that is needed
later (a third of a job's cost in made-up markets that get worse; nothing is lost in real ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.platform.market.chain import GRADES, NONE, STATES, Chain

WAIT, ON_DEMAND, SPOT = 0, 1, 2
"""What to do in a step."""
_NEVER = np.float32(1e9)
"""Stands for infinite: finite, so that chances of 0 times it are 0."""

Table = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do, by [steps left, state, slack in steps]: from nothing and from on-demand by the
    market's state, from spot by the own grade."""

    idle: Table
    on_demand: Table
    spot: Table

    def at(self, table: Table, state: int, work_steps: float, slack_steps: float) -> int:
        """The decision for work and slack in steps, slack rounded down and work up: as if a little
        later than it is."""
        slack = min(max(int(slack_steps + 1e-6), 0), table.shape[2] - 1)
        left = min(slack + int(np.ceil(work_steps - 1e-6)), table.shape[0] - 1)
        return int(table[left, state, slack])


def solve(chain: Chain, on_demand_usd: float, delay: int, steps: int, slack: int) -> Plan:
    """Plan ahead ``steps`` steps with at most ``slack`` to spare; a start takes ``delay`` steps.

    A step costs the price it is paid at: what is minimised is dollars an hour x steps, per node.
    """
    width = slack + 1
    idle = np.zeros((STATES, width), np.float32)
    bought = np.zeros((delay + 1, STATES, width), np.float32)  # on-demand, by delay left
    held = np.zeros((delay + 1, GRADES, width), np.float32)  # spot, likewise
    plan = Plan(
        np.zeros((steps + 1, STATES, width), dtype=np.int8),
        np.zeros((steps + 1, STATES, width), dtype=np.int8),
        np.zeros((steps + 1, GRADES, width), dtype=np.int8),
    )
    market = chain.market.astype(np.float32)
    kept = (chain.grade * (1 - chain.eviction)[:, None]).astype(np.float32)
    lost = (chain.after * chain.eviction[:, None]).astype(np.float32)
    usd, price = chain.usd[:, None].astype(np.float32), np.float32(on_demand_usd)
    for left in range(1, steps + 1):
        later = _one_slack_less(idle)  # no progress in this step
        best = market @ later
        best[NONE:] = _NEVER
        buying, holding = np.empty_like(bought), np.empty_like(held)
        buying[0] = market @ bought[0] + price
        holding[0] = kept @ held[0] + lost @ idle + usd
        if delay:
            buying[1:] = market @ _one_slack_less(bought[:-1]) + price
            holding[1:] = kept @ _one_slack_less(held[:-1]) + (lost @ later + usd)
        act, up = plan.idle[left], best[NONE:]
        act[:] = buying[delay] < best  # ON_DEMAND, else WAIT
        np.minimum(best, buying[delay], out=best)
        act[NONE:][holding[delay] < up] = SPOT
        np.minimum(up, holding[delay], out=up)
        np.minimum(best, _NEVER, out=best)
        plan.on_demand[left] = np.where(buying[0] <= best, ON_DEMAND, act)
        plan.spot[left] = np.where(holding[0] <= up, SPOT, act[NONE:])
        idle, bought, held = best, np.minimum(best, buying), np.minimum(up, holding)
        if left <= slack:  # with as much slack as steps left, the work is done
            idle[:, left:], bought[:, :, left:], held[:, :, left:] = 0.0, 0.0, 0.0
    return plan


def _one_slack_less(values: NDArray[np.float32]) -> NDArray[np.float32]:
    moved = np.empty_like(values)
    moved[..., 0] = _NEVER
    moved[..., 1:] = values[..., :-1]
    return moved
