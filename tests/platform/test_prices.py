from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.errors import ConfigError
from ebbtide.platform.prices import Market, load_catalogue

ENTRY = """\
instance_types:
  box:
    provider: mine
    vcpus: 8
    memory_gb: 32
    usd_per_hour: {on_demand: 0.8064, spot: }
    source: our contract
    date: 2025-07-01
"""


def catalogue(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return path


def test_a_price_is_exactly_the_number_in_the_file(tmp_path: Path) -> None:
    prices = load_catalogue(catalogue(tmp_path, ENTRY))
    assert prices.price("box", "on_demand") == Decimal("0.8064")


def test_blank_absent_and_unnamed_are_unknown(tmp_path: Path) -> None:
    prices = load_catalogue(catalogue(tmp_path, ENTRY))
    assert prices.price("box", Market.SPOT) is None
    assert prices.price("box", Market.ON_PREM) is None
    assert prices.price("other", Market.SPOT) is None
    assert prices.price(None, Market.SPOT) is None
    without = ENTRY.replace("    usd_per_hour: {on_demand: 0.8064, spot: }\n", "")
    assert load_catalogue(catalogue(tmp_path, without)).price("box", "on_demand") is None


def test_spot_in_a_zone_may_have_a_price_of_its_own(tmp_path: Path) -> None:
    text = ENTRY.replace("spot: ", "spot: 0.3, spot_by_zone: {z-a: 0.25, z-b: 0.4, z-d: }")
    prices = load_catalogue(catalogue(tmp_path, text))
    asked = [prices.price("box", Market.SPOT, zone) for zone in ("z-a", "z-b", "z-d", None)]
    assert asked == [Decimal("0.25"), Decimal("0.4"), Decimal("0.3"), Decimal("0.3")]
    assert prices.price("box", Market.ON_DEMAND, "z-a") == Decimal("0.8064")
    only = load_catalogue(catalogue(tmp_path, text.replace("spot: 0.3, ", "")))
    assert only.price("box", Market.SPOT, "z-b") == Decimal("0.4")
    assert only.price("box", Market.SPOT, "z-c") is None
    blank = load_catalogue(catalogue(tmp_path, ENTRY.replace("spot: ", "spot_by_zone: ")))
    assert blank.price("box", Market.SPOT, "z-a") is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (("0.8064", "0"), "usd_per_hour.on_demand"),
        (("0.8064", "-1"), "usd_per_hour.on_demand"),
        (("0.8064", ".nan"), "usd_per_hour.on_demand"),
        (("0.8064", "1e30"), "usd_per_hour.on_demand"),
        (("0.8064", "cheap"), "usd_per_hour.on_demand"),
        (("spot: ", "spot_by_zone: {z: 0}"), "usd_per_hour.spot_by_zone.z"),
        (("vcpus", "vcpu"), "vcpu is not a known key; did you mean vcpus"),
        (("    source: our contract\n", ""), "source is missing"),
    ],
)
def test_a_faulty_entry_is_refused_with_its_line(
    tmp_path: Path, fault: tuple[str, str], said: str
) -> None:
    path = catalogue(tmp_path, ENTRY.replace(*fault))
    with pytest.raises(ConfigError, match=rf"{path}:\d+: instance_types\.box.*{said}"):
        load_catalogue(path)


def test_a_type_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = catalogue(tmp_path, ENTRY + ENTRY.partition("\n")[2])
    with pytest.raises(ConfigError, match=rf"{path}:9: .*box is given twice \(first on line 2\)"):
        load_catalogue(path)


def test_the_shipped_catalogue_prices_every_type_on_demand() -> None:
    prices = load_catalogue()
    assert len(prices.instance_types) >= 12
    for name, entry in prices.instance_types.items():
        on_demand = prices.price(name, "on_demand")
        assert on_demand is not None, name
        assert (prices.price(name, "spot") or Decimal(0)) < on_demand
        assert (entry.gpus > 0) == (entry.gpu is not None) == (entry.gpu_memory_gb is not None)
    assert prices.price("local-cpu", "spot") is not None


def test_overheads_of_owned_machines_are_part_of_their_price(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "on_prem_overheads: {network: 0.20, cooling: 0.10}\n"
        "instance_types: {box: {provider: us, vcpus: 8, memory_gb: 32, source: s, date: 2025-07-01,"
        " usd_per_hour: {on_prem: 3.60, on_demand: 9}}}\n"
    )
    catalogue = load_catalogue(path)
    assert catalogue.price("box", Market.ON_PREM) == Decimal("4.68")
    assert catalogue.price("box", Market.ON_DEMAND) == Decimal(9)
    path.write_text("on_prem_overheads: {network: -1}\ninstance_types: {}")
    with pytest.raises(ConfigError, match=r"prices.yaml:1: on_prem_overheads\.network"):
        load_catalogue(path)
