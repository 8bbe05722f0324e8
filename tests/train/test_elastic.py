"""The elastic rules, and a run on a real cluster through notice, kill and growth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.train import elastic
from ebbtide.train.elastic import GROWTH_INTERVAL_S, GROWTH_STABLE_S, Limits, Offer, Running

LIMITS = Limits(1, 4)


def running(*nodes: str, began_s: float = 0.0) -> Running:
    return Running(nodes, began_s, has_left=False)


OFFERS = st.lists(
    st.builds(
        Offer,
        node_id=st.sampled_from("abcdefgh"),
        workers=st.integers(0, 4),
        draining=st.booleans(),
        reachable=st.booleans(),
    ),
    unique_by=lambda offer: offer.node_id,
)


@given(OFFERS, st.integers(1, 5), st.integers(0, 5))
def test_a_start_is_within_the_limits_and_what_is_usable(
    offers: list[Offer], fewest: int, more: int
) -> None:
    limits = Limits(fewest, fewest + more)
    usable = sum(each.workers for each in offers if each.reachable and not each.draining)
    start = elastic.workers_to_start(offers, limits)
    if start is None:
        assert usable < fewest
    else:
        assert fewest <= start <= min(usable, limits.most)
        assert start == min(usable, limits.most)


def test_a_notice_is_followed_at_once() -> None:
    offers = [Offer("aaaaaaaaaa", 1), Offer("bbbbbbbbbb", 1, draining=True)]
    reason = elastic.reason_to_leave(
        offers, running("aaaaaaaaaa", "bbbbbbbbbb"), LIMITS, 0.0, more_since_s=None
    )
    assert reason == "notice: bbbbbbbb will be taken away"


def test_a_notice_for_a_node_of_no_rank_changes_nothing() -> None:
    offers = [Offer("a", 1), Offer("b", 1, draining=True)]
    assert elastic.reason_to_leave(offers, running("a"), LIMITS, 1e9, None) is None


@given(st.floats(0, 60), st.floats(0, 60))
def test_growth_waits_until_it_is_stable_and_the_generation_not_young(
    age_s: float, since_s: float
) -> None:
    offers = [Offer("a", 1), Offer("b", 1)]
    reason = elastic.reason_to_leave(
        offers, running("a"), LIMITS, now_s=age_s, more_since_s=age_s - since_s
    )
    ready = age_s >= GROWTH_INTERVAL_S and age_s - (age_s - since_s) >= GROWTH_STABLE_S
    assert (reason is not None) == ready
    assert reason is None or reason.startswith("growth: 2 workers")


def test_nodes_that_must_not_be_used_are_asked_for_again() -> None:
    offers = [Offer("a", 2), Offer("b", 2, draining=True), Offer("c", 1, reachable=False)]
    assert elastic.hidden_workers(offers) == 3
