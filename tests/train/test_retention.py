"""What is kept, for any set of checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.train.config import CheckpointConfig
from ebbtide.train.manifest import CheckpointInfo, State
from ebbtide.train.retention import best, surplus

GRACE_S = 600.0


def keep(last: int, keep_best: bool = True) -> CheckpointConfig:
    return CheckpointConfig(keep_last=last, keep_best=keep_best, grace_s=GRACE_S)


KEEP = keep(3)


def info(
    step: int,
    state: State = "complete",
    token: str = "aa",
    loss: float | None = None,
    is_pinned: bool = False,
    written_s: float = 0.0,
) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        uri=f"runs/r/checkpoints/step-{step:08d}-{token}",
        state=state,
        size_bytes=1,
        time_s=0.0,
        validation_loss=loss,
        is_pinned=is_pinned,
        written_s=written_s,
    )


def test_the_newest_are_kept() -> None:
    found = [info(step) for step in (10, 8, 6, 4, 2)]
    assert surplus(found, found[0], KEEP) == [info(4), info(2)]
    assert surplus(found, found[0], keep(1)) == found[1:]


def test_a_stale_higher_step_neither_counts_nor_goes() -> None:
    # Case C1: resumed from 9 with a stale step 50 present: the next save must survive.
    found = [info(50), info(60, "incomplete"), info(10, token="bb"), info(9)]
    assert surplus(found, info(10, token="bb"), keep(1)) == [info(9)]


def test_broken_ones_go_when_a_newer_one_is_whole() -> None:
    found = [info(10, "incomplete", "bb"), info(10), info(9, "incomplete"), info(8, "corrupt")]
    assert surplus(found, info(10), KEEP) == [info(8, "corrupt"), info(9, "incomplete")]


def test_the_best_by_validation_loss_stays_however_old() -> None:
    found = [info(5, loss=2.0), info(4), info(3, loss=1.5), info(2, loss=1.0), info(1, loss=3.0)]
    assert surplus(found, found[0], keep(1)) == [info(4), info(3, loss=1.5), info(1, loss=3.0)]
    assert surplus(found, found[0], keep(1, keep_best=False)) == found[1:]
    better = info(6, loss=0.5)
    assert info(2, loss=1.0) in surplus([better, *found], better, keep(1))


def test_the_best_of_equals_is_the_newest_and_never_a_broken_or_nameless_one() -> None:
    assert best([info(1, loss=1.0), info(3, loss=1.0), info(2, loss=1.0)]) == info(3, loss=1.0)
    assert best([info(1, "corrupt", loss=0.1), info(2, loss=float("nan")), info(3)]) is None
    assert best([]) is None


def test_what_a_person_has_pinned_stays() -> None:
    found = [info(5), info(4), info(3, is_pinned=True), info(2, "corrupt", is_pinned=True)]
    assert surplus(found, found[0], keep(1)) == [info(4)]


def test_what_another_attempt_left_goes_after_the_grace_time_only() -> None:
    now_s = 10_000.0
    committed = info(10, token="bb", written_s=now_s)
    young = [info(s, "incomplete", written_s=now_s - GRACE_S + 1) for s in (9, 10, 11)]
    old = [info(s, "incomplete", "cc", written_s=now_s - GRACE_S) for s in (9, 10, 11)]
    own = info(8, "incomplete", "bb", written_s=now_s - 1)  # a save of ours that was refused
    assert surplus([committed, *young, *old, own], committed, KEEP) == [*old, own]


STATES: list[State] = ["complete", "incomplete", "corrupt"]
INFOS = st.lists(
    st.builds(
        info,
        st.integers(0, 20),
        st.sampled_from(STATES),
        st.text("abcdef", min_size=2, max_size=2),
        st.none() | st.floats(0, 9),
        st.booleans(),
        st.floats(0, 2000),
    ),
    unique_by=lambda i: i.name,
)


@given(INFOS, st.integers(0, 20), st.integers(1, 5), st.booleans(), st.none() | st.floats(0, 9))
def test_always(
    found: list[CheckpointInfo], step: int, last: int, keep_best: bool, loss: float | None
) -> None:
    committed = info(step, token="0123", loss=loss, written_s=1500.0)
    whole = [*found, committed]
    gone = surplus(whole, committed, keep(last, keep_best))
    assert committed not in gone
    assert len({one.name for one in gone}) == len(gone)
    assert not any(one.is_pinned and one.state != "incomplete" for one in gone)
    assert all(one.step <= step for one in gone if one.state != "incomplete")
    place = (committed.step, committed.name)
    past = [one for one in whole if (one.step, one.name) <= place and one.state == "complete"]
    kept = [one for one in past if one not in gone]
    assert len(kept) >= min(last, len(past))
    assert len([one for one in kept if not one.is_pinned]) <= last + keep_best
    newest = sorted((one.step for one in past), reverse=True)[:last]
    assert all(one.step <= newest[-1] for one in gone if one.state == "complete")
    champion = best(past)
    assert not keep_best or champion is None or champion in kept
    now_s = max(one.written_s for one in whole)
    for one in found:
        if one.state == "incomplete":
            assert (one in gone) == (now_s - one.written_s >= GRACE_S)


@given(INFOS, st.integers(1, 3))
def test_no_two_that_are_committed_at_once_remove_each_other(
    found: list[CheckpointInfo], last: int
) -> None:
    complete = [one for one in found if one.state == "complete"]
    gone = {one.name: surplus(found, one, keep(last)) for one in complete}
    for one in complete:
        for other in complete:
            assert not (one in gone[other.name] and other in gone[one.name])
