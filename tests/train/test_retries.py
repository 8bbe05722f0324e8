"""What a run is forgiven."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.errors import DataError, NotFiniteError
from ebbtide.platform.ray_seam.decisions import ProcessLost
from ebbtide.train.failures import Cause, Failure, PeerLost, UserCrash
from ebbtide.train.retries import Retries, Verdict

LOST = Failure(Cause.NODE_LOST, 0, PeerLost("x"))
KILLED = Failure(Cause.KILLED, 0, ProcessLost("x"))
CRASH = Failure(Cause.CRASH, 0, UserCrash("boom"))
NAN = Failure(Cause.NOT_FINITE, 0, NotFiniteError("step 5: nan", 5))
FINAL = Failure(Cause.FINAL, 0, DataError("bad shard"))


@given(st.lists(st.integers(0, 5)))
def test_lost_nodes_are_forgiven_without_end(steps: list[int]) -> None:
    retries = Retries(0, skip_bad_batch=False)
    assert all(retries.judge(LOST, step, ()) == Verdict(go_on=True) for step in steps)


def test_crashes_are_forgiven_as_often_as_the_job_says_with_longer_and_longer_pauses() -> None:
    retries = Retries(3, skip_bad_batch=False)
    verdicts = [retries.judge(CRASH, step, ()) for step in (5, 9, 7, 8)]
    assert [verdict.go_on for verdict in verdicts] == [True, True, True, False]
    assert [verdict.wait_s for verdict in verdicts[:3]] == [1.0, 2.0, 4.0]
    assert all(verdict.counted for verdict in verdicts)


def test_a_crash_that_comes_again_at_the_same_step_ends_the_run() -> None:
    retries = Retries(10, skip_bad_batch=False)
    assert retries.judge(CRASH, 5, ()).go_on
    assert retries.judge(LOST, 5, ()).go_on
    assert retries.judge(CRASH, 5, ()) == Verdict(go_on=False, counted=True)


def test_kills_are_forgiven_while_the_run_comes_further() -> None:
    retries = Retries(1, skip_bad_batch=False)
    assert [retries.judge(KILLED, step, ()).counted for step in (0, 4, 9)] == [False] * 3
    assert retries.judge(KILLED, 9, ()) == Verdict(go_on=True, counted=True, wait_s=1.0)
    assert not retries.judge(KILLED, 8, ()).go_on


@pytest.mark.parametrize("skip", [False, True])
def test_a_batch_that_is_not_finite_is_left_out_once_if_the_job_allows_it(skip: bool) -> None:
    retries = Retries(10, skip_bad_batch=skip)
    assert retries.judge(NAN, 4, ()) == Verdict(go_on=skip, skip=5 if skip else None)
    assert retries.judge(NAN, 8, (5,)) == Verdict(go_on=False)


def test_what_would_come_again_ends_the_run() -> None:
    assert Retries(10, skip_bad_batch=True).judge(FINAL, 0, ()) == Verdict(go_on=False)
