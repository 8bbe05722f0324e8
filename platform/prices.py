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

UsdPerHour = Annotated[Decimal, Field(gt=0, allow_inf_nan=False)]
"""Dollars an hour. A blank means unknown; 0 is refused, as it would make a run look free."""

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


class Market(StrEnum):
    """How a node was bought."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    ON_PREM = "on_prem"


class MarketPrices(Config):
    """Dollars an hour of one instance in each market; a market left out or blank is unknown."""

    on_demand: UsdPerHour | None = None
    spot: UsdPerHour | None = None
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


class Catalogue(Config):
    """Instance types by name. A name given twice is refused with both lines."""

    instance_types: dict[str, InstanceType]

    def price(self, instance_type: str | None, market: Market | str) -> Decimal | None:
        """Dollars an hour, or None where type or price is unknown."""
        entry = self.instance_types.get(instance_type or "")
        if entry is None or entry.usd_per_hour is None:
            return None
        price: Decimal | None = getattr(entry.usd_per_hour, Market(market).value)
        return price


def load_catalogue(path: str | Path | None = None) -> Catalogue:
    """The catalogue of a file, or the shipped one. Raises ConfigError with file, line and key."""
    if path is not None:
        return config.load(path, Catalogue)
    shipped = resources.files("ebbtide.platform") / "catalogue.yaml"
    return config.parse(shipped.read_text(encoding="utf-8"), Catalogue, "catalogue.yaml")
