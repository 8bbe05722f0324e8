from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.account import Dollars, account, usd_text
from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Catalogue, Market, load_catalogue
from ebbtide.platform.records import (
    Attempt,
    Finished,
    NodeDown,
    NodeUp,
    Record,
    Span,
    Transfer,
    TrialEnded,
)

T = 1_700_000_000.0
CATALOGUE = """\
instance_types:
  box:
    provider: mine
    vcpus: 8
    memory_gb: 32
    usd_per_hour: {on_demand: 3.60, spot: 1.20}
    source: our contract
    date: 2025-07-01
  blank: {provider: mine, vcpus: 8, memory_gb: 32, source: none yet, date: 2025-07-01}
"""


def prices(tmp_path: Path, text: str = CATALOGUE) -> Catalogue:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return load_catalogue(path)


def node_up(
    catalogue: Catalogue,
    node_id: str,
    at_s: float,
    instance_type: str = "box",
    market: Market = Market.ON_DEMAND,
) -> NodeUp:
    return NodeUp(
        node_id=node_id,
        time_s=T + at_s,
        instance_type=instance_type,
        market=market,
        usd_per_hour=catalogue.price(instance_type, market),
        usd_per_hour_on_demand=catalogue.price(instance_type, Market.ON_DEMAND),
    )


def node_down(node_id: str, at_s: float) -> NodeDown:
    return NodeDown(node_id=node_id, time_s=T + at_s)


def compute(node_id: str, start_s: float, end_s: float, attempt: int, *steps: int) -> Span:
    return Span(
        node_id=node_id,
        attempt=attempt,
        start_s=T + start_s,
        end_s=T + end_s,
        seconds={Owner.COMPUTE: end_s - start_s},
        first_step=steps[0],
        last_step=steps[1],
    )


def finished(at_s: float, status: str = "finished") -> Finished:
    return Finished(time_s=T + at_s, status=status)


def test_600_seconds_at_3_60_are_60_cents_also_when_asked_later(tmp_path: Path) -> None:
    records: list[Record] = [node_up(prices(tmp_path), "n", 0), node_down("n", 600), finished(600)]
    for asked_s in (600, 86_400, 86_400 * 365):
        result = account(records, T + asked_s)
        assert result.total.spent.usd == Decimal("0.60")
        assert result.total.spent.text() == "$0.6000"
        assert result.total.seconds == 600
        assert result.status == "finished"


def test_a_repriced_catalogue_leaves_the_past(tmp_path: Path) -> None:
    before: list[Record] = [node_up(prices(tmp_path), "n", 0), node_down("n", 600)]
    dearer = prices(tmp_path, CATALOGUE.replace("3.60", "36"))
    after: list[Record] = [node_up(dearer, "m", 600), node_down("m", 1200)]
    by_node = account([*before, *after], T + 9999).by(lambda row: row.node.node_id)
    assert {n: total.spent.usd for n, total in by_node.items()} == {
        "n": Decimal("0.6"),
        "m": Decimal(6),
    }


def test_three_preempted_attempts_sum(tmp_path: Path) -> None:
    catalogue = prices(tmp_path)
    records: list[Record] = []
    for number, (start_s, end_s) in enumerate([(0, 100), (150, 350), (400, 700)]):
        first = number * 10
        records += [
            node_up(catalogue, f"n{number}", start_s, market=Market.SPOT),
            Attempt(index=number, start_s=T + start_s, first_step=first),
            compute(f"n{number}", start_s, end_s, number, first + 1, first + 10),
            node_down(f"n{number}", end_s),
        ]
    result = account([*records, finished(700)], T + 800)
    assert {n: t.seconds for n, t in result.by_attempt.items()} == {0: 100, 1: 200, 2: 300}
    assert result.total.seconds == 600
    assert result.total.spent.usd == Decimal("0.2")
    assert result.total.on_demand.usd == Decimal("0.6")
    assert result.goodput == 1


def test_a_failed_launch_costs_nothing(tmp_path: Path) -> None:
    before: list[list[Record]] = [
        [],
        [Attempt(index=0, start_s=T, first_step=0)],
        [node_up(prices(tmp_path), "n", 0, "absent"), node_down("n", 0)],
    ]
    for records in before:
        result = account([*records, finished(30, "failed")], T + 60)
        assert (result.total.spent.usd, result.total.spent.partial) == (Decimal(0), False)
        assert (result.status, result.goodput) == ("failed", None)


def test_absent_and_blank_prices_are_unknown_and_the_total_is_partial(tmp_path: Path) -> None:
    catalogue = prices(tmp_path)
    records: list[Record] = [
        node_up(catalogue, "known", 0),
        node_up(catalogue, "absent", 0, "no-such-type"),
        node_up(catalogue, "blank", 0, "blank"),
        finished(600),
    ]
    result = account(records, T + 600)
    spent = {n: t.spent for n, t in result.by(lambda row: row.node.node_id).items()}
    assert (spent["absent"].usd, spent["absent"].text()) == (None, "unknown")
    assert (spent["blank"].usd, spent["blank"].text()) == (None, "unknown")
    assert result.total.spent.usd == Decimal("0.6")
    assert result.total.spent.partial
    assert result.total.spent.text() == "$0.6000 (partial)"

    nothing_known = account([*records[1:]], T + 600).total.spent
    assert (nothing_known.usd, nothing_known.text()) == (None, "unknown")


def test_an_unknown_spot_price_does_not_take_the_comparison_with_it(tmp_path: Path) -> None:
    catalogue = prices(tmp_path, CATALOGUE.replace(", spot: 1.20", ""))
    records: list[Record] = [node_up(catalogue, "n", 0, market=Market.SPOT), finished(3600)]
    total = account(records, T + 3600).total
    assert (total.spent.usd, total.on_demand.usd) == (None, Decimal("3.6"))


def test_goodput_is_the_compute_of_kept_steps(tmp_path: Path) -> None:
    records: Sequence[Record] = [
        node_up(prices(tmp_path), "n", 0),
        compute("n", 0, 50, 0, 1, 10),
        Attempt(index=1, start_s=T + 60, first_step=8),
        compute("n", 60, 100, 1, 9, 16),
        finished(100),
    ]
    result = account(records, T + 100)
    assert result.goodput == 0.8
    assert result.by_owner[Owner.LOST_WORK].seconds == 10
    assert result.by_owner[Owner.RESTART].seconds == 10


def test_egress_costs_beside_the_node_time_at_the_price_of_its_time() -> None:
    def transfer(at_s: float, size_bytes: int, usd_per_gb: str) -> Transfer:
        price = Decimal(usd_per_gb)
        return Transfer(time_s=T + at_s, attempt=0, size_bytes=size_bytes, usd_per_gb=price)

    cheap, dear = transfer(1, 1_500_000_000, "0.09"), transfer(2, 1, "0.12")
    result = account([cheap, dear, cheap, finished(3)], T + 3)
    assert result.egress_usd == Decimal("0.135") + Decimal("0.12") / 10**9
    assert result.egress_bytes == 1_500_000_001
    assert result.total.spent.usd == 0


def test_a_living_run_a_lost_one_and_one_taken_up_again(tmp_path: Path) -> None:
    up = node_up(prices(tmp_path), "n", 0)
    assert account([up], T + 30).status == "running"
    assert account([up], T + 300).status == "lost"
    assert account([up], T + 300).total.seconds == 0  # nothing is known but that it came up
    again = node_up(prices(tmp_path), "m", 500)
    assert account([up, finished(400, "failed"), again], T + 510).status == "running"
    assert account([], T).status == "lost"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.decimals("0.0001", 999, places=4)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_dollars_are_exact_in_any_order(
    parts: list[tuple[int, Decimal]], shuffler: random.Random
) -> None:
    exact = sum(time_us * int(price * 10_000) for time_us, price in parts)
    shuffler.shuffle(parts)
    total = sum((Dollars.of(time_us, price) for time_us, price in parts), Dollars())
    assert total.priced * 10_000 == exact


def test_dollars_for_a_person() -> None:
    shown = {"0": "$0.0000", "0.6": "$0.6000", "0.00025": "$0.000250", "12.345": "$12.35"}
    assert {usd: usd_text(Decimal(usd)) for usd in shown} == shown
    assert usd_text(Decimal("0.333333"), of=Decimal(1234)) == "$0.33"
    assert usd_text(Decimal("1234567.891")) == "$1,234,567.89"


def test_the_trials_of_a_sweep_are_there_once() -> None:
    def ended(number: int, at_s: float, status: str) -> TrialEnded:
        usd = Decimal("0.5") if number else None
        return TrialEnded(
            time_s=at_s, number=number, status=status, seconds=1.0, usd=usd, saved_s=2.5
        )

    records = [ended(1, T + 9, "finished"), ended(0, T, "failed"), ended(1, T + 3, "stopped")]
    found = account(records, T + 10)
    assert [(each.number, each.status) for each in found.trials] == [(0, "failed"), (1, "finished")]
    assert found.startup_saved_s == 5.0
