"""The real cost of a run: what its nodes cost, and what is paid beside them. Pure, exact decimals.

Formulas: network = nodes x factor (the part that the cluster's network adds to its price: usual is
0.20 for owned machines whose catalogue does not have it yet); storage = GB x dollars per GB and
month x months (a month is 730 hours, GB are 10^9 bytes); engineering = hours x dollars per hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from ebbtide.platform.account import Account

HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Rates:
    """What is paid beside the nodes; 0 leaves a line out."""

    network_factor: Decimal = Decimal(0)
    storage_usd_per_gb_month: Decimal = Decimal(0)
    engineering_usd_per_hour: Decimal = Decimal(0)
    engineering_hours: Decimal = Decimal(0)

    @property
    def given(self) -> bool:
        """Whether there is anything to add."""
        return any((self.network_factor, self.storage_usd_per_gb_month, self.engineering_hours))


@dataclass(frozen=True)
class RealCost:
    """Dollars by what they are for; ``nodes`` is None where no price is known.

    ``partial``: some of the nodes have no known price, and are in no sum here.
    """

    nodes: Decimal | None
    egress: Decimal
    network: Decimal
    storage: Decimal
    engineering: Decimal
    partial: bool = False

    @property
    def total(self) -> Decimal | None:
        """The sum; None where the nodes' cost is unknown."""
        if self.nodes is None:
            return None
        return self.nodes + self.egress + self.network + self.storage + self.engineering


def real_cost(account: Account, rates: Rates, stored_bytes: int, stored_s: float) -> RealCost:
    """``stored_bytes`` have been kept for ``stored_s`` seconds."""
    nodes = account.total.spent.usd
    months = Decimal(stored_s) / 3600 / HOURS_PER_MONTH
    return RealCost(
        nodes=nodes,
        egress=account.egress_usd,
        network=(nodes or Decimal(0)) * rates.network_factor,
        storage=Decimal(stored_bytes) / 10**9 * rates.storage_usd_per_gb_month * months,
        engineering=rates.engineering_usd_per_hour * rates.engineering_hours,
        partial=account.total.spent.partial,
    )
