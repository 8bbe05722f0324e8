"""Token buckets: a minute's worth at once, refilled evenly, with debts for what an answer cost."""

from __future__ import annotations

from ebbtide.serve.keys import Limits
from ebbtide.serve.limits import Refusal, Usage


def test_requests_per_minute_refill_evenly() -> None:
    usage = Usage(Limits(requests_per_minute=6))
    assert [usage.admit(100.0) for _ in range(6)] == [None] * 6
    assert usage.admit(100.0) == Refusal("6 requests per minute", 10)
    assert usage.admit(104.0) == Refusal("6 requests per minute", 6)
    assert usage.admit(110.0) is None
    assert usage.admit(110.0) is not None
    assert [usage.admit(1e6) for _ in range(7)].count(None) == 6  # no more than a minute's worth


def test_tokens_may_run_into_debt_which_is_waited_for() -> None:
    usage = Usage(Limits(tokens_per_minute=60))
    assert usage.admit(0.0) is None
    usage.end(180)
    assert usage.admit(0.0) == Refusal("60 tokens per minute", 121)
    assert usage.admit(120.5) is not None
    assert usage.admit(121.5) is None


def test_concurrent_requests() -> None:
    usage = Usage(Limits(concurrent_requests=1))
    assert usage.admit(0.0) is None
    assert usage.admit(0.0) == Refusal("1 requests at once", 1)
    usage.end(5)
    assert usage.admit(0.0) is None


def test_no_limits() -> None:
    usage = Usage(Limits())
    assert [usage.admit(0.0) for _ in range(1000)] == [None] * 1000
