"""What an instance costs: a dated catalogue that users edit, and the look-up of one price.

Promises: a price comes from the catalogue or it is None ("unknown"); it is never guessed and never
0. A catalogue given by path replaces the shipped one (``platform/catalogue.yaml``) as a whole.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ebbtide.platform import config
from ebbtide.platform.config import Config

UsdPerHour = Annotated[Decimal, Field(gt=0, le=10**9, allow_inf_nan=False)]
"""Dollars an hour. A blank means unknown; 0 is refused, as it would make a run look free."""

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


class Market(StrEnum):
    """How a node was bought."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    ON_PREM = "on_prem"


class MarketPrices(Config):
    """Dollars an hour of one instance in each market; a market left out or blank is unknown.

    ``spot_by_zone`` has the zones whose spot price is another than ``spot``.
    """

    on_demand: UsdPerHour | None = None
    spot: UsdPerHour | None = None
    spot_by_zone: dict[str, UsdPerHour | None] | None = None
    on_prem: UsdPerHour | None = None


class InstanceType(Config):
    """One type of instance. ``gpu_memory_gb`` is per GPU, ``memory_gb`` the host's, GB = 10^9 bytes
    as vendors write it. ``source`` and ``date`` say whose price it is and of when."""

    provider: str
    gpus: Count = 0
    gpu: str | None = None
    gpu_memory_gb: Amount | None = None
    vcpus: Count
    memory_gb: Amount
    network_gbps: Amount | None = None
    usd_per_hour: MarketPrices | None = None
    source: str
    date: date


Part = Annotated[Decimal, Field(ge=0, le=1000, allow_inf_nan=False)]


class Overheads(Config):
    """What owned machines cost beside their own price, as parts of it.

    Usual for a cluster: 0.20 for its network, 0.10 for cooling; power where the price is of the
    hardware alone.
    """

    network: Part = Decimal(0)
    cooling: Part = Decimal(0)
    power: Part = Decimal(0)

    @property
    def factor(self) -> Decimal:
        """What a price is multiplied with."""
        return 1 + self.network + self.cooling + self.power


class Catalogue(Config):
    """Instance types by name. A name given twice is refused with both lines.

    ``on_prem_overheads`` are added to every ``on_prem`` price.
    """

    instance_types: dict[str, InstanceType]
    on_prem_overheads: Overheads = Overheads()

    def price(
        self, instance_type: str | None, market: Market | str, zone: str | None = None
    ) -> Decimal | None:
        """Dollars an hour, or None where type or price is unknown."""
        entry = self.instance_types.get(instance_type or "")
        if entry is None or entry.usd_per_hour is None:
            return None
        prices = entry.usd_per_hour
        if Market(market) is Market.SPOT and (own := (prices.spot_by_zone or {}).get(zone or "")):
            return own
        price: Decimal | None = getattr(prices, Market(market).value)
        if price is not None and Market(market) is Market.ON_PREM:
            return price * self.on_prem_overheads.factor
        return price


def load_catalogue(path: str | Path | None = None) -> Catalogue:
    """The catalogue of a file, or the shipped one. Raises ConfigError with file, line and key."""
    if path is not None:
        return config.load(path, Catalogue)
    shipped = resources.files("ebbtide.platform") / "catalogue.yaml"
    return config.parse(shipped.read_text(encoding="utf-8"), Catalogue, "catalogue.yaml")
