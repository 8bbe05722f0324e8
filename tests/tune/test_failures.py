"""Whatever Ray raises for a call to an evaluator becomes a reason, and a decision to retry."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, RayTaskError

from ebbtide.tune.evaluator import LeaseLost
from ebbtide.tune.failures import failure_of, is_lost
from ebbtide.tune.running import TrialFailed


def told(cause: Exception) -> TrialFailed:
    return failure_of(RayTaskError("f", "trace", cause).as_instanceof_cause())


def test_every_kind_of_failure_becomes_one() -> None:
    assert str(told(TrialFailed("wrong"))) == "wrong" and not told(TrialFailed("wrong")).may_retry
    assert told(TrialFailed("killed", may_retry=True)).may_retry
    assert told(LeaseLost("gone")).may_retry
    assert str(told(ValueError("odd"))) == "ValueError: odd"
    died = failure_of(ActorDiedError())
    assert died.may_retry and not died.evicted


def test_a_seat_is_lost_with_its_lease_only() -> None:
    assert is_lost(LeaseLost("gone"))
    assert not is_lost(TrialFailed("wrong"))
