"""Prices while a run lives: the catalogue, read again when its file changes, and AWS's own.

Promises: :meth:`PriceFeed.price` never waits; a live price comes before the catalogue's, which is
taken where there is none; a catalogue that has become wrong, and an AWS that does not answer, are
logged once and the prices before stay. A daemon thread keeps it up to date.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from ebbtide.platform.aws_prices import AwsPrices
from ebbtide.platform.errors import EbbtideError
from ebbtide.platform.prices import Market, load_catalogue

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0


class Prices(Protocol):
    """Whoever knows prices: a catalogue, or a feed."""

    def price(
        self, instance_type: str | None, market: Market | str, zone: str | None = None
    ) -> Decimal | None:
        """Dollars an hour, or None where type or price is unknown."""


class PriceFeed:
    """``with PriceFeed(path, live) as feed:`` kept up to date meanwhile.

    Raises ConfigError if the catalogue is wrong from the start.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        live: Literal["aws"] | None = None,
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._path, self._interval_s = path, interval_s
        self._stamp = self._stamped()
        self._catalogue = load_catalogue(path)
        self._aws: AwsPrices | None = None
        self._told: str | None = None
        if live == "aws":
            try:
                self._aws = AwsPrices()
            except EbbtideError as error:
                self._tell(error)
        self._asked: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbtide-prices", daemon=True)

    def __enter__(self) -> PriceFeed:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()  # an answer of AWS that is waited for is not waited for

    def price(
        self, instance_type: str | None, market: Market | str, zone: str | None = None
    ) -> Decimal | None:
        """Dollars an hour now, or None where type or price is unknown."""
        if instance_type is None:
            return None
        self._asked.add(instance_type)
        live = self._aws and self._aws.price(instance_type, Market(market), zone)
        return live or self._catalogue.price(instance_type, market)

    def learn(self, instance_types: Collection[str]) -> None:
        """Have the live prices of these types; waits for them."""
        if self._aws is None or not instance_types:
            return
        try:
            self._aws.refresh(instance_types)
        except EbbtideError as error:
            self._tell(error)

    def refresh(self) -> None:
        """What the thread does: look at the file, and ask AWS for what has become old."""
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._catalogue = load_catalogue(self._path)
                logger.info("%s has changed; its prices count from now on", self._path)
            except EbbtideError as error:
                self._tell(error)
        self.learn(set(self._asked))

    def _stamped(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _tell(self, error: EbbtideError) -> None:
        if str(error) != self._told:
            self._told = str(error)
            logger.warning("prices stay as they are: %s", error)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self.refresh()
