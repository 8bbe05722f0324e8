from __future__ import annotations

import logging
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.errors import ConfigError
from ebbtide.platform.price_feed import PriceFeed
from ebbtide.platform.prices import Market
from tests.platform.aws_price_server import PriceServer
from tests.platform.test_aws_prices import server

__all__ = ["server"]

ENTRY = """\
instance_types:
  g6.xlarge: {{provider: aws, vcpus: 4, memory_gb: 16, source: mine, date: 2025-07-01,
              usd_per_hour: {{on_demand: {usd}, spot: 0.1}}}}
"""


def await_condition(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_catalogue_that_changes_counts_from_then_on_and_a_wrong_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(ENTRY.format(usd="1.25"))
    with PriceFeed(path, interval_s=0.01) as feed:

        def price() -> Decimal | None:
            return feed.price("g6.xlarge", "on_demand", "us-west-2a")

        assert price() == Decimal("1.25")
        path.write_text(ENTRY.format(usd="2.5"))
        await_condition(lambda: price() == Decimal("2.5"))
        path.write_text("instance_types: {g6.xlarge: {}}")
        await_condition(lambda: "prices stay as they are" in caplog.text)
        path.unlink()
        assert price() == Decimal("2.5")
        assert feed.price(None, "spot") is None
    with pytest.raises(ConfigError):
        PriceFeed(path)


def test_live_prices_come_before_the_catalogue_s(server: PriceServer, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(ENTRY.format(usd="9"))
    feed = PriceFeed(path, "aws")
    assert feed.price("g6.xlarge", Market.ON_DEMAND) == 9
    feed.refresh()  # what was asked for is fetched
    assert feed.price("g6.xlarge", Market.ON_DEMAND) == Decimal("0.8048")
    assert feed.price("g6.xlarge", Market.SPOT, "us-west-2b") == Decimal("0.295500")
    assert feed.price("g6.xlarge", Market.SPOT, "elsewhere") == Decimal("0.1")


def test_without_an_answer_of_aws_the_catalogue_stays_and_it_is_said_once(
    server: PriceServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refuse = True
    feed = PriceFeed(None, "aws")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert feed.price("g6.xlarge", Market.ON_DEMAND) == Decimal("0.8048")
            feed.refresh()
    assert caplog.text.count("prices stay as they are") == 1
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    assert PriceFeed(None, "aws").price("g6.xlarge", Market.SPOT) == Decimal("0.34")
    assert "no region" in caplog.text
