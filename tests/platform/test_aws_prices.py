"""Prices of AWS through boto3, from a server on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.aws_prices import AwsPrices
from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import CostError
from ebbtide.platform.prices import Market
from tests.platform.aws_price_server import PriceServer, price_server

NOW = 1_800_000_000.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PriceServer]:
    """Three zones, one with an older price beside; the variables lead to it."""
    with price_server() as server:
        server.spot = [
            ("g6.xlarge", "us-west-2a", "2027-01-15T08:00:00.000Z", "0.312300"),
            ("g6.xlarge", "us-west-2b", "2027-01-15T07:00:00.000Z", "0.290000"),
            ("g6.xlarge", "us-west-2b", "2027-01-15T07:30:00.000Z", "0.295500"),
            ("g6.xlarge", "us-west-2c", "2027-01-15T06:00:00.000Z", "0.400000"),
        ]
        server.on_demand = [("g6.xlarge", "us-west-2", "0.8048000000")]
        settings = {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",  # of an S3 server: not for prices
            "AWS_ENDPOINT_URL_EC2": server.url,
            "AWS_ENDPOINT_URL_PRICING": server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-west-2",
            "XDG_CACHE_HOME": str(tmp_path),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield server


def test_spot_by_zone_and_on_demand_by_region(server: PriceServer) -> None:
    prices = AwsPrices(clock=FakeClock(NOW))
    assert prices.price("g6.xlarge", Market.SPOT, "us-west-2a") is None
    prices.refresh({"g6.xlarge"})
    assert prices.price("g6.xlarge", Market.SPOT, "us-west-2a") == Decimal("0.312300")
    assert prices.price("g6.xlarge", Market.SPOT, "us-west-2b") == Decimal("0.295500")
    assert prices.price("g6.xlarge", Market.ON_DEMAND, None) == Decimal("0.8048")
    assert prices.price("g6.xlarge", Market.SPOT, None) is None
    assert prices.price("g6.xlarge", Market.SPOT, "us-west-2z") is None
    assert prices.price("g6.xlarge", Market.ON_PREM, None) is None
    assert len(prices.zones("g6.xlarge")) == 3
    assert server.requests == ["spot g6.xlarge 0", "spot g6.xlarge 2", "on_demand g6.xlarge"]


def test_a_price_is_kept_for_a_while_also_between_processes(server: PriceServer) -> None:
    clock = FakeClock(NOW)
    AwsPrices(clock=clock).refresh({"g6.xlarge"})
    server.requests.clear()
    again = AwsPrices(clock=clock)
    again.refresh({"g6.xlarge"})
    assert again.price("g6.xlarge", Market.ON_DEMAND, None) == Decimal("0.8048")
    assert server.requests == []
    clock.sleep(400.0)
    assert again.price("g6.xlarge", Market.SPOT, "us-west-2a") is None
    server.spot[0] = ("g6.xlarge", "us-west-2a", "2027-01-15T08:06:00.000Z", "0.5")
    again.refresh({"g6.xlarge"})
    assert again.price("g6.xlarge", Market.SPOT, "us-west-2a") == Decimal("0.5")
    assert server.requests == ["spot g6.xlarge 0", "spot g6.xlarge 2"]


def test_a_type_that_aws_does_not_have_has_no_price_and_is_not_asked_for_again(
    server: PriceServer, tmp_path: Path
) -> None:
    prices = AwsPrices(clock=FakeClock(NOW))
    prices.refresh({"no-such"})
    prices.refresh({"no-such"})
    assert prices.price("no-such", Market.ON_DEMAND, None) is None
    assert server.requests == ["spot no-such 0", "on_demand no-such"]
    (tmp_path / "ebbtide" / "aws-prices.json").write_text("[1, 2")
    AwsPrices(clock=FakeClock(NOW)).refresh({"no-such"})
    assert len(server.requests) == 4


def test_a_refusal_a_wrong_answer_and_a_missing_setting_are_said(
    server: PriceServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.refuse = True
    with pytest.raises(CostError, match=r"UnauthorizedOperation.*allow ec2:DescribeSpotPrice"):
        AwsPrices().refresh({"g6.xlarge"})
    server.refuse, server.garbage = False, True
    with pytest.raises(CostError, match="not the documented answer for g6.xlarge"):
        AwsPrices().refresh({"g6.xlarge"})
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(CostError, match="no region; set AWS_REGION"):
        AwsPrices()
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CostError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        AwsPrices()
