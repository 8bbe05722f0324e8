"""What to fix first: the parts of a run's cost that could be less, dearest first. Pure.

Promises: the dollars of an advice are what the ledger says was spent on it, all of which the ideal
run would save; nothing is advised that is below a percent of the node time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ebbtide.platform.account import Account, Dollars, Total
from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market

_WORTH = 0.01
"""Below this part of the node time nothing is advised."""

_FIXES: dict[Owner, str] = {
    Owner.DATA_STALL: "the loop waits for its batches: put the data nearer (prepare it onto faster "
    "storage), or give each worker more CPUs (workers.cpus)",
    Owner.NETWORK_STALL: "ranks wait for each other: fewer, larger nodes, a faster network between "
    "them (one zone), a larger batch for each (batch.micro_sequences), or reduction: plain",
    Owner.CHECKPOINT_STALL: "the loop waits for saves: raise checkpoint.every_steps, as "
    "checkpoint.memory covers the steps between",
    Owner.RESTART: "nodes wait for the run to begin or go on: start nodes from an image with the "
    "packages on it, prefer zones with fewer evictions, and do not let nodes wait for others "
    "(workers.min)",
    Owner.LOST_WORK: "steps were made twice: keep checkpoint.memory on, lower "
    "checkpoint.every_steps, and run ebbtide agent so that evictions are announced",
    Owner.VALIDATION: "lower validation.sequences, or raise validation.every_steps",
    Owner.IDLE: "nodes are paid for that make no steps: let the cluster take idle nodes away "
    "sooner, or raise workers.max if there are more than the job may use",
}


@dataclass(frozen=True)
class Advice:
    """``percent`` of the node time, and the dollars it cost; what to do about it."""

    what: str
    percent: float
    spent: Dollars
    fix: str

    def text(self, total: Dollars) -> str:
        """For a person; dollars with as many places as fit the run's ``total``."""
        return f"{self.what} {self.percent:.0f}%: {self.spent.text(total)}; {self.fix}"


def advice(account: Account) -> list[Advice]:
    """What could be saved, dearest first."""
    whole = account.total
    found = [
        Advice(owner.value.replace("_", " "), _percent(part, whole), part.spent, _FIXES[owner])
        for owner, part in account.by_owner.items()
        if owner in _FIXES and part.time_us >= _WORTH * max(whole.time_us, 1)
    ]
    return sorted(found, key=lambda each: (-(each.spent.usd or 0), -each.percent))


def market_text(account: Account) -> str | None:
    """What the choice of markets has saved, or None where it cannot be said."""
    total = account.total
    spent, on_demand = total.spent.usd, total.on_demand.usd
    if spent is None or not on_demand or total.spent.partial or total.on_demand.partial:
        return None
    if all(row.node.market is Market.ON_DEMAND for row in account.rows):
        return "all nodes were on demand: spot nodes cost a third or less where there are some"
    word: Literal["less", "more"] = "less" if spent <= on_demand else "more"
    part = abs(on_demand - spent) / on_demand
    return f"{part:.0%} {word} than the same node time on demand ({total.on_demand.text()})"


def _percent(part: Total, whole: Total) -> float:
    return 100 * part.time_us / whole.time_us if whole.time_us else 0.0
