"""What AWS asks for an instance now: spot prices by zone, on-demand prices by region.

From two documented interfaces, through boto3 and its credentials: ``ec2:DescribeSpotPriceHistory``
and ``pricing:GetProducts`` (Linux, shared tenancy). Promises: :meth:`AwsPrices.price` never waits;
a price is kept for five minutes (spot) or a day (on demand), also between processes, in a file; a
type, zone or market that AWS does not name has no price. ``AWS_ENDPOINT_URL``, which leads to an
S3-compatible server, is not asked for prices; ``AWS_ENDPOINT_URL_EC2`` and ``_PRICING`` are.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import CostError
from ebbtide.platform.prices import Market

logger = logging.getLogger(__name__)

_SPOT_AGE_S, _ON_DEMAND_AGE_S = 300.0, 86_400.0
_TIMEOUT_S, _MAX_ATTEMPTS = 10, 3
_PRICING_REGION = "us-east-1"
"""The price list is served from a few regions only, for all of them."""

_FILTERS = {
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "tenancy": "Shared",
    "capacitystatus": "Used",
}

Prices = dict[str, Decimal]
"""Dollars an hour by zone; on demand the only key is the region."""


def default_cache() -> Path:
    """Where prices are kept between processes."""
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "ebbtide" / "aws-prices.json"


class AwsPrices:
    """Of one region (default: AWS's configured one). Thread-safe.

    Raises CostError without a region, or where boto3 finds no credentials.
    """

    def __init__(
        self, region: str | None = None, *, cache: Path | None = None, clock: Clock | None = None
    ) -> None:
        import boto3

        self._session = boto3.session.Session()
        found = region or self._session.region_name or os.environ.get("AWS_REGION")
        if not found:
            raise CostError("live prices of AWS: no region; set AWS_REGION")
        if self._session.get_credentials() is None:
            raise CostError(
                "live prices of AWS: no credentials; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the machine an instance profile"
            )
        self.region: str = found
        self._clock = clock or SystemClock()
        self._cache = cache or default_cache()
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._known: dict[str, tuple[float, Prices]] = _read(self._cache)

    def price(self, instance_type: str, market: Market, zone: str | None) -> Decimal | None:
        """Dollars an hour as of the last refresh; None if it is not known, or too old."""
        if market is Market.ON_PREM:
            return None
        place = self.region if market is Market.ON_DEMAND else zone
        prices = self._fresh(self._key(instance_type, market), market)
        return None if prices is None or place is None else prices.get(place)

    def zones(self, instance_type: str) -> dict[str, Decimal]:
        """The spot price in every zone that has one, as of the last refresh."""
        return dict(self._fresh(self._key(instance_type, Market.SPOT), Market.SPOT) or {})

    def refresh(self, instance_types: Collection[str]) -> None:
        """Ask AWS for whatever is not known or has become old. May wait. Raises CostError."""
        asks: Mapping[Market, Callable[[str], Prices]] = {
            Market.SPOT: self._spot,
            Market.ON_DEMAND: self._on_demand,
        }
        changed = False
        for market, ask in asks.items():
            for name in sorted(instance_types):
                key = self._key(name, market)
                if self._fresh(key, market) is None:
                    found = self._asked(ask, name)
                    with self._lock:
                        self._known[key] = self._clock.time(), found
                    changed = True
        if changed:
            with self._lock:
                _write(self._cache, self._known)

    def _key(self, instance_type: str, market: Market) -> str:
        return f"{self.region}/{instance_type}/{market.value}"

    def _fresh(self, key: str, market: Market) -> Prices | None:
        limit_s = _SPOT_AGE_S if market is Market.SPOT else _ON_DEMAND_AGE_S
        with self._lock:
            at_s, prices = self._known.get(key, (0.0, None))
        return prices if self._clock.time() - at_s < limit_s else None

    def _asked(self, ask: Callable[[str], Prices], instance_type: str) -> Prices:
        import botocore.exceptions

        try:
            return ask(instance_type)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise CostError(
                f"live prices of AWS in {self.region}: {error}; allow ec2:DescribeSpotPriceHistory "
                "and pricing:GetProducts, or leave cost.live out"
            ) from error
        except (KeyError, TypeError, ValueError, InvalidOperation) as error:
            raise CostError(
                f"live prices of AWS in {self.region}: not the documented answer for "
                f"{instance_type}: {error!r}"
            ) from error

    def _spot(self, instance_type: str) -> Prices:
        pages = self._client("ec2", self.region).get_paginator("describe_spot_price_history")
        newest: dict[str, tuple[datetime, Decimal]] = {}
        for page in pages.paginate(
            InstanceTypes=[instance_type],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.fromtimestamp(self._clock.time(), UTC),  # the prices in force
        ):
            for each in page["SpotPriceHistory"]:
                zone, at = each["AvailabilityZone"], each["Timestamp"]
                if zone not in newest or at > newest[zone][0]:
                    newest[zone] = at, Decimal(each["SpotPrice"])
        return {zone: usd for zone, (_, usd) in newest.items()}

    def _on_demand(self, instance_type: str) -> Prices:
        wanted = {"instanceType": instance_type, "regionCode": self.region, **_FILTERS}
        pages = self._client("pricing", _PRICING_REGION).get_paginator("get_products")
        filters = [{"Type": "TERM_MATCH", "Field": f, "Value": v} for f, v in wanted.items()]
        found = {
            usd
            for page in pages.paginate(ServiceCode="AmazonEC2", Filters=filters)
            for product in page["PriceList"]
            for usd in _hourly(json.loads(product))
        }
        return {self.region: min(found)} if found else {}

    def _client(self, service: str, region: str) -> Any:
        import botocore.config

        if service in self._clients:
            return self._clients[service]
        own = f"AWS_ENDPOINT_URL_{service.upper()}" in os.environ
        self._clients[service] = self._session.client(
            service,
            region_name=region,
            config=botocore.config.Config(
                retries={"mode": "standard", "max_attempts": _MAX_ATTEMPTS},
                connect_timeout=_TIMEOUT_S,
                read_timeout=_TIMEOUT_S,
                ignore_configured_endpoint_urls=not own,  # type: ignore[call-arg]  # not in stubs
            ),
        )
        return self._clients[service]


def _hourly(product: Mapping[str, Any]) -> Iterator[Decimal]:
    """The dollars an hour of one product of the price list; entries without a price have 0."""
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            usd = Decimal(dimension["pricePerUnit"].get("USD", "0"))
            if dimension["unit"] == "Hrs" and usd > 0:
                yield usd


def _read(path: Path) -> dict[str, tuple[float, Prices]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: (float(at_s), {place: Decimal(usd) for place, usd in prices.items()})
            for key, (at_s, prices) in kept.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, InvalidOperation) as error:
        logger.warning("%s: kept prices cannot be read and are asked for again: %s", path, error)
        return {}


def _write(path: Path, known: Mapping[str, tuple[float, Prices]]) -> None:
    kept = {key: (at_s, {p: str(usd) for p, usd in v.items()}) for key, (at_s, v) in known.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps(kept), encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        logger.warning("%s: prices cannot be kept: %s", path, error)
