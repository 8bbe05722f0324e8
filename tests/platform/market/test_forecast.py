from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from ebbtide.platform import config
from ebbtide.platform.errors import ConfigError
from ebbtide.platform.market.forecast import Forecast, ForecastConfig, forecast

JOB = """\
work_hours: 10
deadline_hours: 14
restart_hours: 0.2
on_demand_usd_per_hour: 3.0
samples: 20
policies: [on_demand, spot_only, greedy]
zones:
  steady: {hours_between_evictions: 200, hours_without_spot: 0.5, usd_per_hour: 1.0}
  poor: {hours_between_evictions: 2, hours_without_spot: 6, usd_per_hour: 0.9}
"""


def made(text: str, folder: Path = Path()) -> Forecast:
    return forecast(config.parse(text, ForecastConfig), folder)


def test_the_best_zone_and_policy_come_first_and_on_demand_beside() -> None:
    result = made(JOB)
    assert "steady" in result.best.zones
    assert result.best.chance == 1.0
    assert result.on_demand is not None
    assert astuple(result.on_demand.usd) == pytest.approx((10.2 * 3.0,) * 3)
    assert result.on_demand.hours is not None
    assert astuple(result.on_demand.hours) == pytest.approx((10.2,) * 3)
    poor = next(c for c in result.choices if (c.policy, c.zones) == ("spot_only", ("poor",)))
    assert poor.chance < 0.5
    assert poor is result.choices[-1]
    assert set(result.sources.values()) == {"model of mean times"}


def test_the_same_seed_gives_the_same_forecast() -> None:
    assert made(JOB) == made(JOB)
    assert made(JOB) != made(JOB + "seed: 1\n")


def test_samples_come_from_the_trace_or_from_a_model_of_it(tmp_path: Path) -> None:
    up = [1] * 40 + [0] * 8
    for name, data in (("long", up * 10), ("short", up)):
        document = {"metadata": {"gap_seconds": 180}, "data": data, "prices": [1.5] * len(data)}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    head = JOB.partition("zones:")[0]
    for name, source in (("long", "trace"), ("short", "model fitted to its trace")):
        result = made(f"{head}zones:\n  z: {{trace: {name}.json}}\n", tmp_path)
        assert result.sources == {"z": source}
        greedy = next(choice for choice in result.choices if choice.policy == "greedy")
        assert greedy.chance == 1.0
        assert greedy.usd.median >= 10.2 * 1.5
    model = made(f"{head}market: model\nzones:\n  z: {{trace: long.json}}\n", tmp_path)
    assert model.sources == {"z": "model fitted to its trace"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "deadline_hours: 14",
            "deadline_hours: 10",
            "config:2: deadline_hours cannot be kept: the deadline is less",
        ),
        ("samples: 20", "sample: 20", "did you mean samples"),
        ("greedy]", "greedy, tyde]", "tyde is not one of tide, on_demand"),
        ("greedy]", "price_pause]", "pause_above_usd_per_hour is missing"),
        ("usd_per_hour: 0.9", "", "zones.poor.usd_per_hour is missing"),
        ("hours_without_spot: 6, ", "", "give trace, or hours_between_evictions"),
        ("on_demand_usd_per_hour: 3.0", "on_demand_usd_per_hour: 0", "on_demand_usd_per_hour"),
        ("work_hours: 10", "work_hours: .nan", "work_hours"),
        ("restart_hours: 0.2", "restart_hours: 1e-9", "the deadline is more"),
        ("deadline_hours: 14", "deadline_hours: 1e300", "cannot be kept: the deadline is more"),
        ("samples: 20", "samples: 1000000000", "samples"),
    ],
)
def test_what_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    assert old in JOB
    with pytest.raises(ConfigError, match=said):
        config.parse(JOB.replace(old, new), ForecastConfig)


def test_a_trace_without_prices_needs_one(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text('{"metadata": {"gap_seconds": 180}, "data": [1, 1]}')
    head = JOB.partition("zones:")[0]
    with pytest.raises(ConfigError, match="zones.z.usd_per_hour"):
        made(f"{head}zones:\n  z: {{trace: z.json}}\n", tmp_path)
