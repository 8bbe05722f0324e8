from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform import config
from ebbtide.platform.budget import (
    SPIKE_STEPS,
    STOP_S,
    Books,
    BudgetConfig,
    judge,
    refusal,
    spike,
)
from ebbtide.platform.config import Config
from ebbtide.platform.errors import ConfigError


class Job(Config):
    name: str
    budget: BudgetConfig = BudgetConfig()


def parse(text: str) -> BudgetConfig:
    return config.parse(f"name: x\nbudget:\n  {text}\n", Job, "job.yaml").budget


def books(**changes: float | Decimal) -> Books:
    """At $3.60 an hour, $0.001 a second: 1-second steps, half of 100 are made."""
    values: dict[str, float | Decimal] = {
        "now_s": 1000.0,
        "started_s": 900.0,
        "usd": Decimal("0.1"),
        "epoch_usd": Decimal("0.02"),
        "usd_per_hour": Decimal("3.60"),
        "step": 50,
        "steps": 100,
        "step_s": 1.0,
        "save_s": 2.0,
        "epoch_steps_left": 10.0,
    }
    return Books(**(values | changes))  # type: ignore[arg-type]


def cautions(budget: BudgetConfig, at: Books) -> list[str]:
    verdict = judge(budget, at)
    assert verdict.stop is None
    return [each.text for each in verdict.cautions]


@pytest.mark.parametrize("key", ["max_dollars_per_run", "max_dollars_per_hour"])
@pytest.mark.parametrize("value", ["-1", ".nan", ".inf", "1e30", "ten", '"5"', "$5", "true", "[5]"])
def test_what_is_no_sum_of_money_is_refused_with_its_line(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"job.yaml:3: budget\.{key}"):
        parse(f"{key}: {value}")


@pytest.mark.parametrize("value", ["tomorrow", "2026-01-31T18:00:00", "1769882400", "12"])
def test_a_deadline_is_a_time_with_its_zone(value: str) -> None:
    with pytest.raises(ConfigError, match=r"job.yaml:3: budget\.deadline"):
        parse(f"deadline: {value}")
    assert parse("deadline: 2026-01-31T18:00:00Z").deadline == datetime(2026, 1, 31, 18, tzinfo=UTC)


def test_a_budget_survives_a_job_file() -> None:
    text = "{max_dollars_per_run: 0.1, deadline: 2026-01-31T18:00:00+01:00, kill_on_loss_spike: 2}"
    job = config.parse(f"name: x\nbudget: {text}", Job)
    assert job.budget.max_dollars_per_run == Decimal("0.1")
    assert config.parse(config.dump(job), Job) == job


def test_a_part_of_a_shared_budget_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="needs budget.max_dollars_per_run"):
        parse("shared: {uri: s3://bucket/team, max_dollars: 10}")


def test_zero_lets_nothing_run_and_a_deadline_must_lie_ahead() -> None:
    for name in ("max_dollars_per_run", "max_dollars_per_epoch", "max_dollars_per_hour"):
        reason = refusal(parse(f"{name}: 0"), 0.0)
        assert reason is not None
        assert f"budget.{name} is 0: nothing runs" in reason
    deadline = parse("deadline: 2026-01-31T18:00:00Z")
    assert deadline.deadline is not None
    at_s = deadline.deadline.timestamp()
    assert "2026-01-31T18:00:00Z has passed" in (refusal(deadline, at_s) or "")
    assert refusal(deadline, at_s - 1) is None
    assert refusal(BudgetConfig(), 0.0) is None


def test_a_run_is_told_at_80_percent_and_when_it_will_go_over_and_stopped_in_time() -> None:
    limit = parse("max_dollars_per_run: 0.2")
    assert cautions(limit, books()) == []  # 50 more steps are $0.05
    assert cautions(limit, books(usd=Decimal("0.16"))) == [
        "$0.1600 of budget.max_dollars_per_run $0.2000 are used",
        "budget.max_dollars_per_run is $0.2000, and at this pace it takes $0.2100: the run will be "
        "stopped at the limit",
    ]
    last = Decimal("0.2") - Decimal(int(STOP_S) + 3) / 1000  # a step, a save, and the way out
    assert judge(limit, books(usd=last - Decimal("0.0001"))).stop is None
    reached = judge(limit, books(usd=last)).stop
    assert reached == "$0.1930 of budget.max_dollars_per_run $0.2000 are spent"


def test_an_epoch_an_hour_and_a_deadline_have_limits_of_their_own() -> None:
    epoch = parse("max_dollars_per_epoch: 0.03")
    assert cautions(epoch, books()) == []  # the 10 steps left are $0.01
    assert "it takes $0.0310" in cautions(epoch, books(epoch_steps_left=11.0))[0]
    assert judge(epoch, books(epoch_usd=Decimal("0.025"))).stop is not None

    hour = parse("max_dollars_per_hour: 4")
    assert "cost $3.6000 of budget.max_dollars_per_hour" in cautions(hour, books())[0]
    assert judge(hour, books(usd_per_hour=Decimal(4))).stop is None
    assert "cost $7.2000 an hour" in (judge(hour, books(usd_per_hour=Decimal("7.2"))).stop or "")

    deadline = BudgetConfig(deadline=datetime.fromtimestamp(1100.0, UTC))
    assert cautions(deadline, books()) == []
    assert "at this pace it takes 250 s" in cautions(deadline, books(step_s=3.0))[0]
    assert judge(deadline, books(now_s=1090.0)).stop is None
    assert judge(deadline, books(now_s=1093.0)).stop is not None


@given(
    st.decimals("0.01", 50, places=3),
    st.floats(0.01, 30),
    st.floats(0, 20),
    st.decimals("0.01", 100, places=2),
)
def test_no_run_costs_more_than_its_limit(
    limit: Decimal, step_s: float, save_s: float, usd_per_hour: Decimal
) -> None:
    """Judged at every step; then the step at work, the save and the way out follow."""
    budget = BudgetConfig(max_dollars_per_run=limit)
    for step in range(2000):
        usd = usd_per_hour * Decimal(step * step_s) / 3600
        now = books(
            usd=usd, usd_per_hour=usd_per_hour, step=step, steps=9999, step_s=step_s, save_s=save_s
        )
        if judge(budget, now).stop is not None:
            end_usd = usd + now.later_usd(now.stop_s)
            assert step == 0 or end_usd - limit <= now.later_usd(step_s)
            return
    assert usd < limit


def test_a_loss_spike_is_one_against_the_median_of_the_steps_before() -> None:
    usual = [4.0 + 0.1 * (n % 3) for n in range(SPIKE_STEPS)]
    assert spike([*usual, 6.0], 1.5) is None
    assert "the loss is 6.3, more than 1.5 times the median" in (spike([*usual, 6.3], 1.5) or "")
    assert spike([*usual[1:], 100.0], 1.5) is None  # too few to know what is usual
    assert spike([*usual, 100.0], None) is None
    assert parse("kill_on_loss_spike: true").spike_factor == 1.5
    assert parse("kill_on_loss_spike: 3").spike_factor == 3.0
    assert parse("kill_on_loss_spike: false").spike_factor is None
    for value in ("1", "0.5", "yes", ".nan"):
        with pytest.raises(ConfigError, match=r"job.yaml:3: budget\.kill_on_loss_spike"):
            parse(f"kill_on_loss_spike: {value}")
