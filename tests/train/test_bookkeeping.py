"""Node stays, attempts and dollars of a driver."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.account import account
from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE, LABEL_MARKET, LABEL_ZONE
from ebbtide.platform.prices import Market, load_catalogue
from ebbtide.platform.records import (
    Attempt,
    Epoch,
    Finished,
    NodeDown,
    NodeUp,
    Record,
    SaveMissed,
    Transfer,
)
from ebbtide.train.bookkeeping import Bookkeeping, ClusterNode
from ebbtide.train.config import CostConfig
from ebbtide.train.events import (
    Checkpoint,
    CheckpointMissed,
    Event,
    Failed,
    GenerationBegan,
    Left,
    NodeLost,
    Notice,
    Step,
)

LABELS = {LABEL_INSTANCE_TYPE: "local-cpu", LABEL_MARKET: "spot", LABEL_ZONE: "z"}


def nodes(*names: str) -> dict[str, ClusterNode]:
    return {name: ClusterNode(name, LABELS) for name in names}


def books(started_s: float = 100.0, first_step: int = 0) -> Bookkeeping:
    return Bookkeeping(CostConfig(), load_catalogue(), started_s, first_step)


def step(number: int, attempt: int, time_s: float, epoch: int = 0) -> Step:
    return Step(
        time_s=time_s,
        attempt=attempt,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        epoch=epoch,
        samples="",
        seconds={},
    )


def began(attempt: int, time_s: float, *names: str) -> GenerationBegan:
    return GenerationBegan(time_s=time_s, attempt=attempt, world_size=len(names), nodes=names)


def test_an_attempt_starts_where_the_one_before_ended() -> None:
    book = books(started_s=100.0)
    assert book.follow([began(0, 110.0, "a", "b")]) == []
    assert book.follow([step(1, 0, 115.0), step(2, 0, 116.0)]) == [
        Attempt(index=0, start_s=100.0, first_step=0),
        Epoch(index=0, start_s=100.0),
    ]
    book.follow([Left(time_s=117.0, attempt=0, step=2)])
    records = book.follow([began(1, 122.0, "a"), step(3, 1, 125.0)])
    assert records == [Attempt(index=1, start_s=117.0, first_step=2)]


def test_an_epoch_begins_where_the_step_before_it_ended() -> None:
    book = books(started_s=100.0)
    book.follow([began(0, 110.0, "a"), step(1, 0, 115.0)])
    assert book.follow([step(2, 0, 116.0), step(3, 0, 118.0, epoch=1)]) == [
        Epoch(index=1, start_s=116.0)
    ]
    again: list[Event] = [
        Left(time_s=119.0, attempt=0, step=3),
        began(1, 125.0, "a"),
        step(2, 1, 127.0),
    ]
    assert book.follow(again)[1:] == [Epoch(index=0, start_s=119.0)]


def test_an_attempt_that_made_no_step_started_from_the_last_checkpoint() -> None:
    book = books(first_step=20)
    assert book.follow(
        [
            began(4, 110.0, "a"),
            Failed(time_s=111.0, attempt=4, cause="crash", message="", counted=True),
        ]
    ) == [Attempt(index=4, start_s=100.0, first_step=20)]
    records = book.follow(
        [
            began(5, 120.0, "a"),
            step(21, 5, 121.0),
            Checkpoint(time_s=122.0, attempt=5, step=21, uri=""),
            began(6, 130.0, "a"),
            began(7, 140.0, "a"),
        ]
    )
    assert [(each.index, each.first_step) for each in records if isinstance(each, Attempt)] == [
        (5, 20),
        (6, 21),
    ]


def test_a_node_is_the_runs_from_when_it_is_held_to_its_end() -> None:
    book = books()
    records, events = book.see(["a"], nodes("a", "b"), set(), 100.0)
    assert events == []
    (up,) = records
    assert isinstance(up, NodeUp)
    assert (up.node_id, up.market, up.zone) == ("a", Market.SPOT, "z")
    assert up.usd_per_hour is not None
    assert book.see(["a"], nodes("a", "b"), set(), 200.0) == ([], [])
    book.follow([began(0, 200.0, "a")])
    records, events = book.see(["a"], nodes("b"), set(), 3700.0)
    assert records == [NodeDown(node_id="a", time_s=3700.0)]
    assert events == [NodeLost(time_s=3700.0, node="a", announced=False)]
    assert book.usd(9999.0) == up.usd_per_hour
    assert not book.partial


def test_a_node_that_was_announced_stays_the_runs_until_it_is_gone() -> None:
    book = books()
    book.follow([began(0, 100.0, "a", "b")])
    book.see(["a", "b"], nodes("a", "b"), set(), 100.0)
    assert book.follow([Notice(time_s=110.0, node="b", deadline_s=160.0)]) == []
    assert book.see(["a"], nodes("a", "b"), {"b"}, 120.0) == ([], [])
    records, events = book.see(["a"], nodes("a"), set(), 130.0)
    assert records == [NodeDown(node_id="b", time_s=130.0)]
    assert events == [NodeLost(time_s=130.0, node="b", announced=True)]


def test_a_node_that_is_known_to_be_lost_only_after_the_restart_is_told_once() -> None:
    book = books()
    book.follow([began(0, 100.0, "a", "b")])
    book.see(["a", "b"], nodes("a", "b"), set(), 100.0)
    assert book.see(["a"], nodes("a", "b"), set(), 110.0)[1] == []
    book.follow([began(1, 111.0, "a")])
    lost = NodeLost(time_s=112.0, node="b", announced=False)
    assert book.see(["a"], nodes("a"), set(), 112.0)[1] == [lost]
    book.follow([began(2, 113.0, "a")])
    assert book.see(["a"], nodes("a"), set(), 114.0)[1] == []


def test_a_node_that_is_given_back_is_not_lost() -> None:
    book = books()
    book.follow([began(0, 100.0, "a")])
    book.see(["a", "b"], nodes("a", "b"), set(), 100.0)
    records, events = book.see(["a"], nodes("a", "b"), set(), 110.0)
    assert (records, events) == ([NodeDown(node_id="b", time_s=110.0)], [])


def test_a_node_without_a_known_price_makes_the_sum_partial() -> None:
    book = books()
    unknown = {"x": ClusterNode("x", {LABEL_INSTANCE_TYPE: "no-such-type"})}
    records, _ = book.see(["x"], unknown, set(), 0.0)
    assert isinstance(records[0], NodeUp)
    assert records[0].usd_per_hour is None
    assert book.partial
    assert book.usd(3600.0) == Decimal(0)


def test_a_save_s_egress_is_paid_for_where_it_has_a_price() -> None:
    save = Checkpoint(time_s=5.0, attempt=0, step=1, uri="x", size_bytes=2_000_000_000)
    assert books().follow([save]) == []
    usd = Decimal("0.09")
    book = Bookkeeping(CostConfig(egress_usd_per_gb=usd), load_catalogue(), 0.0, 0)
    assert book.follow([save]) == [
        Transfer(time_s=5.0, attempt=0, size_bytes=2_000_000_000, usd_per_gb=usd)
    ]
    assert book.usd(9.0) == Decimal("0.18")


class Moving:
    """A price that moves."""

    def __init__(self) -> None:
        self.usd = Decimal(1)

    def price(self, kind: str | None, market: Market | str, zone: str | None = None) -> Decimal:
        return self.usd


def test_a_price_that_moves_counts_from_then_on() -> None:
    prices = Moving()
    book = Bookkeeping(CostConfig(), prices, 0.0, 0)
    book.see(["a", "b"], nodes("a", "b"), set(), 0.0)
    assert book.reprice(1800.0) == []
    prices.usd = Decimal(3)
    records = book.reprice(3600.0)
    assert [(r.node_id, r.usd_per_hour) for r in records if isinstance(r, NodeUp)] == [
        ("a", Decimal(3)),
        ("b", Decimal(3)),
    ]
    assert (book.usd(7200.0), book.usd_per_hour) == (Decimal(2 + 6), Decimal(6))
    assert book.reprice(7200.0) == []
    book.see([], nodes("a", "b"), set(), 7200.0)
    prices.usd = Decimal(4)
    assert (book.usd(9000.0), book.market_usd) == (Decimal(8), Decimal(8))
    assert not book.usd_per_hour
    assert book.reprice(9000.0) == []


CHANGES = st.lists(
    st.tuples(
        st.integers(1, 5000).map(lambda ms: ms / 1000),  # since the change before
        st.sets(st.sampled_from("abc")),  # nodes held
        st.sampled_from(("0.5", "1.25", "7")),  # dollars an hour
    ),
    min_size=1,
    max_size=20,
)


@given(CHANGES)
def test_the_books_that_budgets_are_judged_by_are_the_ledger_s(
    changes: list[tuple[float, set[str], str]],
) -> None:
    prices, now_s = Moving(), 1_700_000_000.0
    book = Bookkeeping(CostConfig(), prices, now_s, 0)
    records: list[Record] = []
    for after_s, held, usd in changes:
        now_s += after_s
        prices.usd = Decimal(usd)
        records += book.see(held, nodes("a", "b", "c"), set(), now_s)[0]
        records += book.reprice(now_s)
    now_s += 1.0
    records.append(Finished(time_s=now_s, status="finished"))
    spent = account(records, now_s).total.spent.usd
    assert spent is not None
    book.end(now_s)
    assert abs(book.usd(now_s + 60.0) - spent) < Decimal("1e-6")


def test_a_market_that_is_not_one_falls_back_to_the_jobs() -> None:
    book = books()
    odd = {"x": ClusterNode("x", {LABEL_MARKET: "bazaar"})}
    records, _ = book.see(["x"], odd, set(), 0.0)
    assert isinstance(records[0], NodeUp)
    assert records[0].market is Market.ON_DEMAND


def test_saves_that_came_to_nothing_are_in_the_ledger() -> None:
    missed = CheckpointMissed(time_s=120.0, attempt=0, step=7, why="left out", message="slow")
    records = books().follow([began(0, 110.0, "a"), step(7, 0, 115.0), missed])
    assert records[2:] == [SaveMissed(time_s=120.0, attempt=0, step=7, why="left out")]
